"""The shape of a LlamaGen transformer: a Llama decoder over VQ codes with a text or class prefix."""

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlamaConfig

from lantern_hf.models.rotary import PREFIX_ROTATIONS


@strict
class LlamaGenConfig(LlamaConfig):
    """Configuration of `LlamaGenForConditionalGeneration` (LlamaGen, arXiv 2406.06525).

    Token ids `0 .. codebook_size - 1` are VQ codes. The ids after them stand for the prefix and are never generated:
    with text conditioning `caption_token_id` (filled from `caption_embeds`) and `uncond_token_id` (filled from the
    learned unconditional embedding); with class conditioning `codebook_size + c` for class c, the last of them
    unconditional.

    Args:
        codebook_size: Codes of the VQ model, K.
        grid_size: Height and width of the image in tokens.
        conditioning: `"text"` or `"class"`.
        prefix_length: Positions before the image: 120 for text as published, always 1 for classes.
        prefix_rotation: How the prefix is rotated: `"zero"` as published (attention to the prefix is then uniform) or
            `"identity"` (image tokens attend to text by content).
        caption_dim: Width of the caption features (text conditioning).
        num_classes: Number of classes, without the unconditional one (class conditioning).

    Raises:
        ValueError: An unknown `conditioning` or `prefix_rotation`, or a size that does not fit.
    """

    model_type = "llamagen"

    codebook_size: int = 16384
    grid_size: list[int] | tuple[int, ...] = (16, 16)
    conditioning: str = "text"
    prefix_length: int = 120
    prefix_rotation: str = "zero"
    caption_dim: int = 2048
    num_classes: int = 1000
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        self.grid_size = [int(side) for side in self.grid_size]
        if self.conditioning == "class":
            self.prefix_length = 1
        self._check()
        self.vocab_size = self.codebook_size + (2 if self.conditioning == "text" else self.num_classes + 1)
        self.max_position_embeddings = self.prefix_length + self.num_image_tokens
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        """Refuse what no LlamaGen can be built from."""
        if self.conditioning not in ("text", "class"):
            raise ValueError(f"`conditioning` must be 'text' or 'class', got {self.conditioning!r}.")
        if self.prefix_rotation not in PREFIX_ROTATIONS:
            raise ValueError(
                f"`prefix_rotation` must be one of {list(PREFIX_ROTATIONS)}, got {self.prefix_rotation!r}."
            )
        if len(self.grid_size) != 2 or min(self.grid_size) < 1:
            raise ValueError(f"`grid_size` must be [height, width] in tokens, both at least 1, got {self.grid_size}.")

    @property
    def num_image_tokens(self) -> int:
        """Tokens of one image."""
        return self.grid_size[0] * self.grid_size[1]

    @property
    def caption_token_id(self) -> int:
        """Placeholder id of a caption position (text conditioning)."""
        return self.codebook_size

    @property
    def uncond_token_id(self) -> int:
        """Id of the unconditional prefix: a placeholder with text, the extra class with classes."""
        return self.vocab_size - 1


AutoConfig.register("llamagen", LlamaGenConfig, exist_ok=True)
