"""Images among the parts of a message, as OpenAI's and vLLM's Python callers give them:

{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}     or the URL itself
{"type": "image_pil", "image_pil": an image of Pillow}                     sent as PNG
"""

import base64
import io
from collections.abc import Mapping
from typing import Any

from pipeline.client import protocol as p

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Modes of Pillow's images that a PNG has. Others are converted."""
PARTS = ("image_url", "image_pil")


def image_part(part: Mapping[str, Any], where: str) -> p.ContentPart:
    """The part of the protocol, of one whose type is in `PARTS`. Only the server checks the URL. Raises TypeError that
    names `where`."""
    match part:
        case {"type": "image_url", "image_url": str(url)}:
            return p.ContentPart("image_url", image_url=p.ImageUrl(url))
        case {"type": "image_url", "image_url": {"url": str(url), **others}} if set(others) <= {"detail"}:
            detail = others.get("detail")
            if detail is not None and not isinstance(detail, str):
                raise TypeError(f"{where}['image_url']['detail'] must be a text, not {type(detail).__name__}")
            return p.ContentPart("image_url", image_url=p.ImageUrl(url, detail))
        case {"type": "image_pil", "image_pil": image} if _is_pillow(image):
            return p.ContentPart("image_url", image_url=p.ImageUrl(_png_url(image)))
        case {"type": "image_pil"}:
            raise TypeError(f"{where}['image_pil'] must be an image of Pillow")
    raise TypeError(f'{where} must be a dict such as {{"type": "image_url", "image_url": {{"url": "data:…"}}}}')


def prompt_images(data: Any, where: str) -> list[p.ImageUrl]:
    """Those of a text prompt, of its `multi_modal_data` in vLLM's format: {"image": an image of Pillow, or a list of
    them}. Raises TypeError that names `where`."""
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise TypeError(f'{where} must be a dict such as {{"image": …}}: a model takes texts and images')
    images = data.get("image", [])
    found = []
    for index, image in enumerate(images if isinstance(images, (list, tuple)) else [images]):
        if not _is_pillow(image):
            raise TypeError(f"{where}['image'] must be an image of Pillow, or a list of them: number {index} is none")
        found.append(p.ImageUrl(_png_url(image)))
    return found


def _is_pillow(image: Any) -> bool:
    return hasattr(image, "save") and hasattr(image, "mode")


def num_bytes(part: p.ContentPart) -> int:
    """Of an image's URL; 0 for a text."""
    return len(part.image_url.url) if isinstance(part.image_url, p.ImageUrl) else 0


def _png_url(image: Any) -> str:
    file = io.BytesIO()
    (image if image.mode in PNG_MODES else image.convert("RGB")).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
