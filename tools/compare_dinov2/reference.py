"""What ONNX Runtime computes. Runs outside the project's environment: argv has the ONNX file and the .npz to write."""

import sys

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

NUM_IMAGES = 4
SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
POSITIONS, HIDDEN = "/backbone/embeddings/Concat_6_output_0", "/backbone/layernorm/Add_1_output_0"


def main() -> int:
    model = onnx.load(sys.argv[1])
    named = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    found = {name: value for name, value in named.items() if name.startswith("backbone.")}
    for node in model.graph.node:  # transposed matrices have numbers for names, and the module's name is the node's
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder") and node.input[1] in named:
            found[node.name.strip("/").removesuffix("/MatMul").replace("/", ".") + ".weight"] = named[node.input[1]].T
    for name in (POSITIONS, HIDDEN):
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    images = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIDE // 8, SIDE // 8, 3), np.uint8)
    pixels = images.repeat(8, axis=1).repeat(8, axis=2).transpose(0, 3, 1, 2)
    mean, std = (np.array(each, np.float64)[:, None, None] for each in (MEAN, STD))
    values = ((pixels / 255 - mean) / std).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    positions, hidden = session.run([POSITIONS, HIDDEN], {"input_image": values})
    np.savez(sys.argv[2], pixels=pixels, positions=positions.reshape(-1, positions.shape[-1]), hidden=hidden, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
