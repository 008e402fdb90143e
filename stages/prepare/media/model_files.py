"""The files that say how images are processed, read with errors that name file and key."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from pipeline.media.config import MAX_SIDE, Color
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.vision.tower_defaults import CLIP, IDEFICS3_DEFAULTS, PIXTRAL, SIGLIP_KIND, TOWER_DEFAULTS

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"

FEATURE_EXTRACTOR = "feature_extractor_type"
PROCESSOR_TYPES = ("image_processor_type", FEATURE_EXTRACTOR)

BLACK: Color = (0.0, 0.0, 0.0)
WHITE: Color = (1.0, 1.0, 1.0)
HALF: Color = (0.5, 0.5, 0.5)
CLIP_MEAN: Color = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Color = (0.26862954, 0.26130258, 0.27577711)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3

TOWERS = {"llava": CLIP, "llava_onevision": SIGLIP_KIND, "gemma3": SIGLIP_KIND, "mistral3": PIXTRAL}
"""The towers of models, by their `model_type`, if vision_config does not say its own."""


class MediaFault(ConfigFault):
    """A wrong value in one of the files."""

    def __init__(self, file: str, words: str) -> None:
        super().__init__(words)
        self.file = file


class ModelFiles:
    """The contents of the files of one model."""

    def __init__(
        self,
        config: Mapping[str, Any],
        image_processor: Mapping[str, Any],
        processor: Mapping[str, Any],
        tokenizer_config: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> None:
        self.config, self.image_processor, self.processor = config, image_processor, processor
        self._tokenizer_config, self._tokenizer = tokenizer_config, tokenizer

    def require_type(self, *names: str) -> str:
        """The class of the image processor without `Fast`, which must be one of these; the first if the file names
        none. Old files name a feature extractor. Raises MediaFault."""
        given = [key for key in PROCESSOR_TYPES if self.image_processor.get(key) is not None]
        if not given:
            return names[0]
        key, value = given[0], self.image_processor[given[0]]
        stem = value.removesuffix("Fast").removesuffix("Pil") if isinstance(value, str) else value
        if key == FEATURE_EXTRACTOR and isinstance(stem, str):
            stem = stem.replace("FeatureExtractor", "ImageProcessor")
        if stem not in names:
            raise MediaFault(PREPROCESSOR, f"{key} is {shown(value)}; supported are {', '.join(names)}")
        return str(stem)

    def common(self, resample: int, mean: Color, std: Color) -> dict[str, Any]:
        """The fields that all families have, besides tokens. The parameters are defaults. Raises MediaFault."""
        image = self.image_processor
        with in_file(PREPROCESSOR):
            keys = Keys(image, {}, {})
            scale = keys.number("rescale_factor", 1 / 255) if keys.flag("do_rescale", True) else 1.0
            found = keys.get("resample", int, resample)
            if not 0 <= found <= 5:
                raise keys.fault("resample", "the number of a filter, 0 to 5")
            colors = (_color(keys, "image_mean", mean), _color(keys, "image_std", std))
            if not keys.flag("do_normalize", True):
                colors = (BLACK, WHITE)
            if scale <= 0 or not all(colors[1]):
                raise ConfigFault("rescale_factor must be above 0, and no value of image_std 0")
        return {"resample": found, "scale": scale, "mean": colors[0], "std": colors[1]}

    def size(self, key: str, default: int | Mapping[str, int], *allowed: str, square: bool = True) -> dict[str, int]:
        """A size: an object with one of the combinations of keys, such as "height width". `square`: whether a number
        is both height and width; else it is the shortest edge. Raises MediaFault."""
        value = self.image_processor.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool):
            value = {"height": value, "width": value} if square else {"shortest_edge": value}
        elif isinstance(value, list) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        if isinstance(value, Mapping):
            found = {name: number for name, number in value.items() if number is not None}
            for names in allowed:
                if found.keys() == set(names.split()) and all(map(_is_side, found.values())):
                    return found
        words = " or ".join(f"{' and '.join(names.split())}" for names in allowed)
        raise MediaFault(
            PREPROCESSOR, f"{key} is {shown(value)}; it must be an object with {words}, of 1 to {MAX_SIDE}"
        )

    def flag(self, key: str, default: bool) -> bool:
        """Of the image processor. Raises MediaFault."""
        with in_file(PREPROCESSOR):
            return Keys(self.image_processor, {}, {}).flag(key, default)

    def require_resize(self) -> None:
        """Raises MediaFault if images are not resized."""
        if not self.flag("do_resize", True):
            raise MediaFault(PREPROCESSOR, "do_resize is False; images of any size are not supported")

    def require_in_processor(self, key: str, value: int, why: str) -> None:
        """Raises MediaFault if the processor has another value; `why` is what the error says before the right one."""
        if self.processor.get(key) not in (None, value):
            raise MediaFault(PROCESSOR, f"{key} is {shown(self.processor[key])}; {why} {value}")

    def count(self, file: str, key: str, default: int | None = None) -> int:
        """A positive integer of a file. Raises MediaFault."""
        where = {CONFIG: self.config, PREPROCESSOR: self.image_processor, PROCESSOR: self.processor}[file]
        with in_file(file):
            return Keys(where, {}, {}).count(key, default)

    def vision(self, key: str, default: int | None = None) -> int:
        """A positive integer of `vision_config`. Older versions of transformers don't write those that are the default
        of the tower's class. Required if neither that nor `default` is there. Raises MediaFault."""
        with in_file(CONFIG):
            return _vision_count(self._vision_config(), key, self._tower_defaults().get(key, default))

    def tower(self) -> str | None:
        """The kind of the vision tower, if the files tell. Raises MediaFault."""
        with in_file(CONFIG):
            kind = self._vision_config().get("model_type")
            kind = TOWERS.get(str(self.config.get("model_type"))) if kind is None else kind
            if not isinstance(kind, str | None):
                raise ConfigFault(f"vision_config.model_type is {shown(kind)}; it must be of type str")
            return kind

    def _vision_config(self) -> Mapping[str, Any]:
        vision = self.config.get("vision_config")
        if not isinstance(vision, dict):
            raise ConfigFault(f"vision_config is {shown(vision)}; it must be the object that describes the tower")
        return vision

    def _tower_defaults(self) -> Mapping[str, Any]:
        if self.config.get("model_type") in ("idefics3", "smolvlm"):
            return IDEFICS3_DEFAULTS
        return TOWER_DEFAULTS.get(self.tower() or "", {})

    def id_of(self, stem: str, default: int) -> int:
        """The id of a token of config.json, whose key ends with `_id` or `_index`. Raises MediaFault."""
        key = next((key for key in (f"{stem}_index", f"{stem}_id") if self.config.get(key) is not None), f"{stem}_id")
        with in_file(CONFIG):
            return Keys(self.config, {}, {}).count(key, default, least=0)

    def token_of(self, stem: str, default: int) -> str:
        """The token of such an id. Raises MediaFault if the tokenizer has none."""
        number = self.id_of(stem, default)
        token = self._tokenizer.id_to_token(number)
        if not token:
            raise MediaFault(CONFIG, f"{stem}_id is {number}; the tokenizer has no such id")
        self._require_single(token, CONFIG)
        return token

    def image_token(self, default_id: int) -> dict[str, Any]:
        """The fields of a family with one token for an image and for its rows. Raises MediaFault."""
        token = self.token_of("image_token", default_id)
        return {"placeholder": token, "row_token": token, "row_id": self.id_of("image_token", default_id)}

    def named_token(self, name: str, default: str) -> str:
        """A token that the processor takes from the tokenizer by a name. Raises MediaFault if it is none."""
        extra = self._tokenizer_config.get("extra_special_tokens")
        value = extra.get(name) if isinstance(extra, dict) else None
        value = value or self._tokenizer_config.get(name) or self.processor.get(name) or default
        token = value.get("content") if isinstance(value, dict) else value
        if not isinstance(token, str) or not token:
            raise MediaFault(PROCESSOR, f"{name} is {shown(value)}; it must be a token")
        self._require_single(token, PROCESSOR)
        return token

    def _require_single(self, token: str, file: str) -> None:
        if self._tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
            raise MediaFault(file, f"{shown(token)} stands for images; the tokenizer must have it as one special token")


def _vision_count(vision: Mapping[str, Any], key: str, default: int | None) -> int:
    value = default if vision.get(key) is None else vision[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigFault(f"vision_config.{key} is {shown(value)}; it must be an integer of at least 1")
    return value


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIDE


def _color(keys: Keys, key: str, default: Color) -> Color:
    value = keys.get(key, (list, int, float), list(default))
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values):
        raise keys.fault(key, "three numbers")
    red, green, blue = map(float, values)
    return red, green, blue


@contextmanager
def in_file(file: str) -> Iterator[None]:
    """Faults in this block are of a file."""
    try:
        yield
    except MediaFault:
        raise
    except ConfigFault as fault:
        raise MediaFault(file, str(fault)) from fault
