"""What is published of the client wire, made from the types in pipeline/client/protocol/:

docs/protocol.schema.json     every message, as a JSON Schema
docs/protocol.md              the tables of fields and the transcripts between its marks
tests/protocol/vectors.json   messages as hex and as objects, for every client to replay

python -m tools.export_protocol            write them
python -m tools.export_protocol --check    exit with 1 where one of them is not what the types say
"""

import argparse
import sys

from tools.export_protocol.published import ROOT, published


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in published().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(published()[path])
        print(f"{path.relative_to(ROOT)}: {'is out of date' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
