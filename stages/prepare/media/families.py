"""How each family's files say how its images are processed. Defaults are those of transformers."""

from collections.abc import Callable, Mapping
from functools import partial
from math import isqrt

from pipeline.media.config import (
    MAX_PATCHES,
    Gemma3,
    Idefics3,
    Llava,
    LlavaOnevision,
    MediaConfig,
    PanAndScan,
    Pixtral,
    Qwen2VL,
    Size,
)
from pipeline.stages.prepare.families.keys import Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.media.model_files import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    CONFIG,
    HALF,
    LANCZOS,
    PREPROCESSOR,
    MediaFault,
    ModelFiles,
    in_file,
)
from pipeline.stages.prepare.vision.tower_defaults import CLIP, SIGLIP_KIND

DEFAULT, FULL = "default", "full"
ANYRES = "anyres_max_"
PIXTRAL = "PixtralImageProcessor"


def idefics3(files: ModelFiles) -> Idefics3:
    files.require_type("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    tile = files.size("max_image_size", {"longest_edge": 364}, "longest_edge")["longest_edge"]
    merge = files.count(CONFIG, "scale_factor", 2)
    tile_rows = (tile // files.vision("patch_size")) ** 2 // merge**2
    files.require_in_processor("image_seq_len", tile_rows, "a tile has")
    longest = files.size("size", {"longest_edge": 4 * 364}, "longest_edge")["longest_edge"]
    return Idefics3(
        **files.common(LANCZOS, HALF, HALF),
        **files.image_token(128257),
        longest_edge=longest if files.flag("do_resize", True) else None,
        tile=tile,
        splits=files.flag("do_image_splitting", True),
        tile_rows=tile_rows,
        fake_token=files.named_token("fake_image_token", "<fake_token_around_image>"),
        global_token=files.named_token("global_image_token", "<global-img>"),
    )


def llava(files: ModelFiles) -> Llava | Pixtral:
    kind = files.require_type("LlavaImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor", PIXTRAL)
    if kind == PIXTRAL:
        return pixtral(files)
    files.require_resize()
    is_siglip = kind == "SiglipImageProcessor"
    given = files.size(
        "size",
        {"height": 224, "width": 224} if is_siglip else {"shortest_edge": 224},
        "height width",
        "shortest_edge",
        square=False,
    )
    size, shortest_edge = _height_width(given), given.get("shortest_edge")
    crop = None
    if not is_siglip and files.flag("do_center_crop", True):
        crop = _height_width(files.size("crop_size", 224, "height width"))
    side = files.vision("image_size")
    if (seen := crop or size) != (side, side):
        shape = "of any shape" if seen is None else f"{seen[0]}×{seen[1]}"
        raise MediaFault(PREPROCESSOR, f"size and crop_size make images {shape}; the vision tower reads {side}×{side}")
    patch = files.vision("patch_size")
    files.require_in_processor("patch_size", patch, "the tower's is")
    return Llava(
        **files.common(BICUBIC, *((HALF, HALF) if is_siglip else (CLIP_MEAN, CLIP_STD))),
        **files.image_token(32000),
        pads_to_square=kind == "LlavaImageProcessor" and files.flag("do_pad", False),
        shortest_edge=shortest_edge,
        size=size,
        crop=crop,
        num_rows=(side // patch) ** 2 + _class_rows(files, DEFAULT),
    )


def llava_onevision(files: ModelFiles) -> LlavaOnevision:
    files.require_type("LlavaOnevisionImageProcessor")
    files.require_resize()
    if files.flag("do_center_crop", False):
        raise MediaFault(PREPROCESSOR, "do_center_crop is True; that is not supported")
    given = files.size("size", {"height": 384, "width": 384}, "height width", "shortest_edge")
    height, width = _height_width(given) or (given["shortest_edge"],) * 2  # as transformers: not the image's shape
    side = files.vision("image_size")
    if (height, width) != (side, side):
        raise MediaFault(PREPROCESSOR, f"size is {height}×{width}; the vision tower reads {side}×{side}")
    if _class_rows(files, FULL) != 0:
        raise MediaFault(CONFIG, "vision_feature_select_strategy must keep the rows of all patches, and no others")
    tile_side = side // files.vision("patch_size")
    files.require_in_processor("num_image_tokens", tile_side**2, "a tile has")
    return LlavaOnevision(
        **files.common(BICUBIC, CLIP_MEAN, CLIP_STD),
        **files.image_token(151646),
        size=(height, width),
        resolutions=_resolutions(files, side),
        tile_side=tile_side,
        max_tiles=_max_tiles(files),
    )


def gemma3(files: ModelFiles) -> Gemma3:
    files.require_type("Gemma3ImageProcessor")
    files.require_resize()
    size = _required_size(files.size("size", {"height": 224, "width": 224}, "height width"))
    side = files.vision("image_size")
    if size != (side, side):
        raise MediaFault(PREPROCESSOR, f"size is {size[0]}×{size[1]}; the vision tower reads {side}×{side}")
    num_rows = files.count(CONFIG, "mm_tokens_per_image", 256)
    per_side = side // files.vision("patch_size")
    if isqrt(num_rows) ** 2 != num_rows or isqrt(num_rows) > per_side or per_side % isqrt(num_rows):
        raise MediaFault(
            CONFIG, f"mm_tokens_per_image is {num_rows}; it must divide {per_side}×{per_side} into squares"
        )
    files.require_in_processor("image_seq_length", num_rows, "mm_tokens_per_image of config.json is")
    begin = files.token_of("boi_token", 255999)
    return Gemma3(
        **files.common(BILINEAR, HALF, HALF),
        placeholder=begin,
        row_token=files.token_of("image_token", 262144),
        row_id=files.id_of("image_token", 262144),
        size=size,
        num_rows=num_rows,
        begin_token=begin,
        end_token=files.token_of("eoi_token", 256000),
        pan_and_scan=_pan_and_scan(files),
    )


def qwen2_vl(files: ModelFiles, image_token: int = 151655) -> Qwen2VL:
    """`image_token` is the id that stands for a row, if config.json does not say it."""
    files.require_type("Qwen2VLImageProcessor")
    files.require_resize()
    image = files.image_processor
    given = {} if image.get("size") is None else image["size"]
    if not isinstance(given, dict) or not given.keys() <= {"shortest_edge", "longest_edge"}:
        words = "it must be an object with shortest_edge and longest_edge, numbers of pixels"
        raise MediaFault(PREPROCESSOR, f"size is {shown(given)}; {words}")
    pixels = {
        "min_pixels": image.get("min_pixels") or given.get("shortest_edge") or 56 * 56,
        "max_pixels": image.get("max_pixels") or given.get("longest_edge") or 28 * 28 * 1280,
    }
    with in_file(PREPROCESSOR):
        keys = Keys(pixels, {}, {})
        least, most = keys.count("min_pixels"), keys.count("max_pixels")
    if least > most:
        raise MediaFault(PREPROCESSOR, f"min_pixels is {least}; it must be at most max_pixels, {most}")
    patch, merge = files.count(PREPROCESSOR, "patch_size", 14), files.count(PREPROCESSOR, "merge_size", 2)
    temporal = files.count(PREPROCESSOR, "temporal_patch_size", 2)
    for key, value in (("patch_size", patch), ("spatial_merge_size", merge), ("temporal_patch_size", temporal)):
        if (own := files.vision(key, value)) != value:
            name = key.removeprefix("spatial_")
            raise MediaFault(PREPROCESSOR, f"{name} is {value}; {key} of vision_config in config.json is {own}")
    return Qwen2VL(
        **files.common(BICUBIC, CLIP_MEAN, CLIP_STD),
        **files.image_token(image_token),
        min_pixels=least,
        max_pixels=max(least, min(most, MAX_PATCHES * patch**2)),
        patch=patch,
        merge=merge,
        temporal_patch=temporal,
    )


def pixtral(files: ModelFiles) -> Pixtral:
    files.require_type(PIXTRAL)
    files.require_resize()
    given = files.size("size", {"longest_edge": 1024}, "longest_edge", "height width")
    longest = given.get("longest_edge")
    patch = files.vision("patch_size")
    merge = files.count(CONFIG, "spatial_merge_size", 2) if files.config.get("model_type") == "mistral3" else 1
    for key, value in (("patch_size", patch), ("spatial_merge_size", merge)):
        files.require_in_processor(key, value, "the model's is")
    return Pixtral(
        **files.common(BICUBIC, CLIP_MEAN, CLIP_STD),
        **files.image_token(10),
        max_size=_required_size(given) if longest is None else (longest, longest),
        patch=patch,
        merge=merge,
        break_token=files.named_token("image_break_token", "[IMG_BREAK]"),
        end_token=files.named_token("image_end_token", "[IMG_END]"),
    )


FAMILIES: Mapping[str, Callable[[ModelFiles], MediaConfig]] = {
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "llava": llava,
    "llava_onevision": llava_onevision,
    "gemma3": gemma3,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_vl,
    "qwen3_vl": qwen2_vl,
    "qwen3_5": partial(qwen2_vl, image_token=248056),
    "qwen3_5_moe": partial(qwen2_vl, image_token=248056),
    "mistral3": pixtral,
}
"""By `model_type` of config.json. Pixtral's is `llava`, too."""


def _height_width(size: Mapping[str, int]) -> Size | None:
    return (size["height"], size["width"]) if "height" in size else None


def _required_size(size: Mapping[str, int]) -> Size:
    return size["height"], size["width"]


def _class_rows(files: ModelFiles, default: str) -> int:
    """Rows that the tower makes besides those of patches, less one that `vision_feature_select_strategy` drops."""
    kind = files.tower()
    if kind not in (CLIP, SIGLIP_KIND):
        raise MediaFault(
            CONFIG, f"model_type of vision_config is {shown(kind)}; supported are {CLIP} and {SIGLIP_KIND}"
        )
    strategy = files.config.get("vision_feature_select_strategy") or default
    if strategy not in (DEFAULT, FULL):
        raise MediaFault(CONFIG, f"vision_feature_select_strategy is {shown(strategy)}; it must be default or full")
    return int(kind == CLIP) - int(strategy == DEFAULT)


def _resolutions(files: ModelFiles, side: int) -> tuple[Size, ...]:
    value = files.image_processor.get("image_grid_pinpoints")
    value = value or [[384 * lines, 384 * columns] for lines in range(1, 7) for columns in range(1, 7)]
    good = isinstance(value, list) and all(
        isinstance(each, list)
        and len(each) == 2
        and all(isinstance(one, int) and one % side == 0 < one for one in each)
        for each in value
    )
    if not good:
        words = f"it must be a list of [height, width], multiples of {side}"
        raise MediaFault(PREPROCESSOR, f"image_grid_pinpoints is {shown(value)}; {words}")
    return tuple((height, width) for height, width in value)


def _max_tiles(files: ModelFiles) -> int:
    value = files.config.get("vision_aspect_ratio") or f"{ANYRES}9"
    number = value.removeprefix(ANYRES) if isinstance(value, str) else ""
    if not (isinstance(value, str) and value.startswith(ANYRES) and number.isdecimal() and 0 < int(number[:9]) < 10000):
        raise MediaFault(CONFIG, f"vision_aspect_ratio is {shown(value)}; it must be {ANYRES} and a number of tiles")
    return int(number)


def _pan_and_scan(files: ModelFiles) -> PanAndScan | None:
    if not files.flag("do_pan_and_scan", False):
        return None
    with in_file(PREPROCESSOR):
        ratio = Keys(files.image_processor, {}, {}).number("pan_and_scan_min_ratio_to_activate", 1.2)
    return PanAndScan(
        files.count(PREPROCESSOR, "pan_and_scan_min_crop_size", 256),
        files.count(PREPROCESSOR, "pan_and_scan_max_num_crops", 4),
        ratio,
    )
