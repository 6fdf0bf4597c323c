"""Chameleon and Anole: images and text in one vocabulary, told apart by what the prompt ends with.

A prompt that ends in an image, which for Anole means right behind the begin-image token, asks for that image: codes,
then the end-image token, and acceptance may be relaxed. Any other prompt asks for text: image tokens are blocked, as
the stock forward does, and acceptance is strict. With `target_options={"interleaved": True}` both follow one another
in one call, rows of a batch each at their own place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lantern_hf._placement import read_weight
from lantern_hf.targets.base import TargetAdapter, left_padded, to_module
from lantern_hf.targets.image_side import Grid, check_vq_model

TEXT = -1
"""Offset of whatever is in no image."""


class ChameleonAdapter(TargetAdapter):
    """Serves `ChameleonForConditionalGeneration`, and Anole, which has the same class.

    Args:
        model: The target.
        input_ids: Prompts of the call.
        interleaved: Whether images and text may follow one another. Otherwise a call makes one or the other.
        special_ids: Token ids by name, where the model's vocabulary map does not hold the published token; the names
            are those of `SPECIAL_TOKENS`.

    Raises:
        ValueError: Prompts ask for different things and `interleaved` is off, or a special token has no id.
    """

    family = "chameleon"
    model_types = ("chameleon",)
    has_codebook = True
    defaults = MappingProxyType({"guidance_scale": 3.0, "top_k": 2000})
    SPECIAL_TOKENS: ClassVar[dict[str, str]] = {
        "begin_image": "<racm3:break>",
        "end_image": "<eoss>",
        "separator": "<reserved08706>",
        "begin": "<s>",
        "pad": "<pad>",
        "end": "</s>",
    }

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor | None = None,
        *,
        interleaved: bool = False,
        special_ids: Mapping[str, int] | None = None,
    ):
        super().__init__(model, input_ids)
        mapping = model.model.vocabulary_mapping
        # The code of an image token is spelled in its name; ids are not in the order of the codes.
        by_code = sorted(mapping.bpe2img, key=mapping.bpe2img.__getitem__)
        self.image_token_ids = torch.tensor(by_code, device=self.device)
        self.special_ids = self._find_special_ids(mapping.vocab_map, special_ids or {})
        self.begin_image_id = self.special_ids["begin_image"]
        self.interleaved, self._prompts = interleaved, input_ids
        self._weight: Tensor | None = None
        if interleaved or self._asks_for_image(input_ids):
            self.structured, self.num_codes = True, len(by_code)
            self.columns = torch.tensor(by_code + self._other_ids(set(by_code)), device=self.device)
            self._is_code = torch.arange(len(self.columns), device=self.device) < self.num_codes

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether the model is Chameleon or Anole."""
        return model.config.model_type == "chameleon" and hasattr(model, "lm_head")

    # ---- vocabulary

    def _find_special_ids(self, vocabulary: Mapping[str, int], given: Mapping[str, int]) -> dict[str, int | None]:
        """Ids by name: given by the user, or those of the published tokens in the model's vocabulary."""
        if unknown := sorted(given.keys() - self.SPECIAL_TOKENS.keys()):
            raise ValueError(
                f"`special_ids` has {', '.join(map(repr, unknown))}, which {self.family} does not know. Its names are "
                f"{', '.join(map(repr, self.SPECIAL_TOKENS))}."
            )
        for name, value in given.items():
            if not 0 <= value < self.vocab_size:
                raise ValueError(f"`special_ids[{name!r}]` must be an id in [0, {self.vocab_size}), got {value!r}.")
        return {name: given.get(name, vocabulary.get(token)) for name, token in self.SPECIAL_TOKENS.items()}

    def special_id(self, name: str) -> int:
        """Give the id of a special token.

        Raises:
            ValueError: It has none.
        """
        value = self.special_ids[name]
        if value is None:
            raise ValueError(
                f"The vocabulary map of this {type(self.model).__name__} has no {self.SPECIAL_TOKENS[name]!r}, the "
                f"{name.replace('_', '-')} token. Pass its id: target_options={{'special_ids': {{{name!r}: ...}}}}."
            )
        return value

    def _other_ids(self, codes: set[int]) -> list[int]:
        """Ids behind the codes among the columns: those an image holds besides, or the whole vocabulary."""
        if self.interleaved:
            return [token for token in range(self.vocab_size) if token not in codes]
        return list(dict.fromkeys(self._structural_ids()))

    def _structural_ids(self) -> list[int]:
        """Ids that an image holds besides codes, and the one that follows it."""
        return [self.special_id("end_image"), self._closing_id]

    @property
    def _closing_id(self) -> int:
        """What follows an image where nothing else may."""
        end = self.special_ids["end"]
        return self.special_id("end_image") if end is None else end

    # ---- what is asked for

    def _asks_for_image(self, input_ids: Tensor | None) -> bool:
        """Whether the prompts end inside an image; rows must agree."""
        if input_ids is None or self.begin_image_id is None or not input_ids.shape[1]:
            return False
        inside = (self._since_begin(input_ids) >= 0).tolist()
        if any(inside) and not all(inside):
            raise ValueError(
                f"{sum(inside)} of {len(inside)} prompts end inside an image, behind the begin-image token "
                f"{self.begin_image_id}, and ask for it, the others for text. Pass "
                "target_options={'interleaved': True}, or generate images and text in separate calls."
            )
        return all(inside)

    def _since_begin(self, input_ids: Tensor) -> Tensor:
        """Tokens behind the begin-image token that no end-image token follows, `(B,)`; `TEXT` where there is none."""
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = [
            torch.where(input_ids == (-1 if token is None else token), place, -1).amax(1)
            for token in (self.special_ids["begin_image"], self.special_ids["end_image"])
        ]
        return torch.where(last[0] > last[1], input_ids.shape[1] - 1 - last[0], TEXT)

    def unconditional(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`[bos, begin-image]` for an image (Anole), the last token for text, as in transformers."""
        if not self.structured or self.interleaved:
            return super().unconditional(input_ids, attention_mask)
        ids = torch.tensor([[self._begin_id, self.special_id("begin_image")]], device=input_ids.device)
        return ids.expand(len(input_ids), -1), None

    @property
    def _begin_id(self) -> int:
        """The token that every prompt begins with."""
        begin = self.special_ids["begin"]
        return self.text_config.bos_token_id if begin is None else begin

    # ---- structure

    @property
    def grid(self) -> Grid:
        """Height and width of an image in tokens, as the model's VQ encoder has it: 32 x 32 for Anole."""
        side = self.model.config.vq_config.resolution // self.pixels_per_token
        return side, side

    @property
    def pixels_per_token(self) -> int:
        """Side of the square of pixels that a token stands for."""
        return 2 ** (len(self.model.config.vq_config.channel_multiplier) - 1)

    def start(self, input_ids: Tensor) -> Tensor:
        """Tokens of the open image of each prompt, -1 in text."""
        return self._since_begin(input_ids) if self.structured else super().start(input_ids)

    def advance(self, offset: Tensor, token_ids: Tensor) -> Tensor:
        """One further; where text may follow, the end-image token leads back to it and the begin-image token out."""
        if not self.interleaved:
            return offset + 1
        inside = (offset >= 0) & (token_ids != self.special_id("end_image"))
        begins = torch.where(token_ids == self.special_id("begin_image"), 0, TEXT)
        return torch.where(inside, offset + 1, begins)

    def forced(self, offset: Tensor) -> Tensor:
        """The end-image token behind the last code; behind that, where no text may follow, the end of the sequence."""
        length = math.prod(self.grid)
        end = torch.where(offset == length, self.special_id("end_image"), -1)
        return torch.where(offset > length, self._closing_id, end)

    def allowed(self, offset: Tensor) -> Tensor | None:
        """Codes in an image, everything else in text."""
        is_code = self._is_code.to(offset.device)
        if not self.interleaved:
            return is_code
        return (offset >= 0)[..., None] == is_code

    # ---- logits

    @property
    def codebook_size(self) -> int:
        """Image tokens, also when a call generates text."""
        return len(self.image_token_ids)

    def codebook(self) -> Tensor | None:
        """Latents of the codes, `(K, d)`, straight from the model's own VQ encoder."""
        return read_weight(self.model.model.vqmodel.quantize.embedding)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the columns, or of the vocabulary with image tokens at the dtype's minimum."""
        head = self.model.lm_head
        hidden_states = to_module(head, hidden_states)
        if self.columns is None:
            logits = head(hidden_states)
            return logits.index_fill(-1, self.image_token_ids.to(logits.device), torch.finfo(logits.dtype).min)
        # A plain layer is sliced once; a quantised, offloaded or adapted one must be called as a module, and slicing
        # to the whole vocabulary would copy it.
        if type(head) is nn.Linear and not hasattr(head, "_hf_hook") and not self.interleaved:
            if self._weight is None:
                self._weight = head.weight[self.columns.to(head.weight.device)]
            return F.linear(hidden_states, self._weight)
        logits = head(hidden_states)
        return logits[..., self.columns.to(logits.device)]

    # ---- text and images of users

    def encode(
        self,
        processor: Any,
        prompts: Sequence[str],
        *,
        guided: bool = False,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Ask for one image a prompt: `[bos] prompt [separator, begin-image]`; unconditional `[bos, begin-image]`."""
        pixels = [side * self.pixels_per_token for side in self.grid]
        for name, value, own in (("height", height, pixels[0]), ("width", width, pixels[1])):
            if value is not None and value != own:
                raise ValueError(f"`{name}` must be {own} for this model, got {value!r}. Leave it out.")
        begin = self.special_id("begin_image")
        inputs = self._encode_text(processor, prompts, [[begin]] * len(prompts))
        inputs["max_new_tokens"] = math.prod(self.grid)
        if guided:
            inputs["negative_prompt_ids"] = torch.tensor([[self._begin_id, begin]] * len(prompts))
        return inputs

    def _encode_text(self, processor: Any, prompts: Sequence[str], tails: list[list[int]]) -> dict[str, Any]:
        """Encode `[bos] prompt [separator]` and a tail of each prompt, padded on the left."""
        tokenizer = getattr(processor, "tokenizer", processor)
        separator = self.special_ids["separator"]
        if separator is None:
            separator = tokenizer.sep_token_id
        if separator is None:
            separator = self.special_id("separator")
        texts = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        rows = [[self._begin_id, *text, separator, *tail] for text, tail in zip(texts, tails, strict=True)]
        pad = self.special_ids["pad"]
        return left_padded(rows, self.text_config.pad_token_id if pad is None else pad)

    def segments(self, token_ids: Tensor) -> list[list[Tensor]]:
        """Take generated tokens apart.

        Args:
            token_ids: What `generate` added to the prompts, `(B, T)` int64.

        Returns:
            For each row, in order: text as token ids `(t,)`, images as codes `(h, w)`, both int64 on the CPU. An image
            that was cut short is left out.

        Raises:
            ValueError: An image holds something else than its structure allows.
        """
        heads = [[]] * len(token_ids) if self._prompts is None else self._open_images(self._prompts)
        return [self._split(head + row) for head, row in zip(heads, token_ids.tolist(), strict=True)]

    def _open_images(self, prompts: Tensor) -> list[list[int]]:
        """Begin-image token and what follows it of the prompts that end inside an image."""
        counts, rows = self._since_begin(prompts).tolist(), prompts.tolist()
        return [row[len(row) - 1 - n :] if n >= 0 else [] for row, n in zip(rows, counts, strict=True)]

    def _split(self, tokens: list[int]) -> list[Tensor]:
        """Text and images of one row."""
        parts: list[Tensor] = []
        text: list[int] = []
        place = 0
        while place < len(tokens):
            if tokens[place] != self.begin_image_id:
                text.append(tokens[place])
                place += 1
                continue
            parts += [torch.tensor(text)] if text else []
            text = []
            codes, place = self._read_image(tokens, place + 1)
            parts += [] if codes is None else [codes]
        return parts + ([torch.tensor(text)] if text else [])

    def _read_image(self, tokens: list[int], place: int) -> tuple[Tensor | None, int]:
        """Codes of the image whose first token is at `place`, None if it is cut short, and the place behind it."""
        count = math.prod(self.grid)
        body = tokens[place : place + count]
        place += count
        place += place < len(tokens) and tokens[place] == self.special_ids["end_image"]
        return (self._codes(body).view(self.grid) if len(body) == count else None), place

    def _codes(self, tokens: list[int]) -> Tensor:
        """Codes of image tokens, `(n,)` int64."""
        mapping = self.model.model.vocabulary_mapping.bpe2img
        if wrong := [(place, token) for place, token in enumerate(tokens) if token not in mapping]:
            raise ValueError(
                f"Token {wrong[0][1]} at code {wrong[0][0]} of an image is no image token. These tokens do not come "
                "from this family's images; pass what `generate` added to the prompts."
            )
        return torch.tensor([mapping[token] for token in tokens], dtype=torch.long)

    def image_codes(self, token_ids: Tensor) -> list[list[Tensor]]:
        """Complete images among generated tokens, as codes; see `segments`."""
        return [[part for part in row if part.ndim == 2] for row in self.segments(token_ids)]

    def check_decoder(self, vq_model: Any = None) -> None:
        """Refuse a missing VQ model, or one of other codes: transformers has Chameleon's encoder only."""
        check_vq_model(
            vq_model,
            self.codebook_size,
            "`vq_model` is needed: transformers' Chameleon holds no VQ decoder. Convert Meta's `vqgan.ckpt` with "
            "lantern_hf.models.vq.chameleon_vq(torch.load('vqgan.ckpt')) and pass the model.",
        )

    def pixels(self, codes: Tensor, vq_model: Any = None) -> Tensor:
        """Decode images `(B, h, w)` with Chameleon's VQ as a `diffusers.VQModel`; raises as `check_decoder`."""
        from lantern_hf.models.vq import decode_codes  # diffusers takes long to import

        self.check_decoder(vq_model)
        return decode_codes(vq_model, codes)

    def pixels_per_code(self, vq_model: Any = None) -> int:
        """Side of the square of pixels that a token stands for."""
        return self.pixels_per_token

    def encode_pixels(self, pixels: Tensor, vq_model: Any = None) -> Tensor:
        """Encode `(B, 3, H, W)` images with the model's own VQ encoder."""
        vq = self.model.model.vqmodel
        with torch.no_grad():
            codes = vq.encode(to_module(vq.encoder.conv_in, pixels).to(vq.dtype), return_dict=True).image_tokens
        height, width = (side // self.pixels_per_token for side in pixels.shape[-2:])
        return codes.view(len(pixels), height, width)
