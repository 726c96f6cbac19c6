"""The recipe's ``train.augment``: random changes of the training samples."""

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from app.config.section import LOCATION, Fraction, Section
from app.errors import RecipeError

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Alpha = Annotated[float, Field(gt=0.0)]


class RandAugmentConfig(Section):
    """RandAugment: a few operations on each image, drawn from fourteen, all of one strength."""

    operations: PositiveInt = Field(default=2, description="operations on each image, one after the other")
    magnitude: Annotated[float, Field(ge=0.0, le=10.0)] = Field(default=9.0, description="their strength, from 0 to 10")


class AugmentImageConfig(Section):
    """Random changes of images, before they are resized."""

    crop: Share | None = Field(
        default=None, description="cut out a part of at least this share of the area; default: the whole image"
    )
    flip: Fraction = Field(default=0.0, description="share of the images that are mirrored, left to right")
    color: Fraction = Field(
        default=0.0, description="largest change of brightness, contrast and saturation, each as a share of it"
    )
    rand_augment: RandAugmentConfig | None = Field(default=None, description="RandAugment; default: none")


class AugmentTextConfig(Section):
    """Random changes of texts. A text without spaces is changed character by character, another word by word."""

    drop: Fraction = Field(default=0.0, description="share of the words that are left out; one always stays")
    swap: Fraction = Field(default=0.0, description="share of the words that change places with the next one")
    synonyms: Annotated[str | None, LOCATION] = Field(
        default=None, description="file of words that may stand for each other: a group a line, separated by commas"
    )
    synonym_share: Fraction = Field(default=0.1, description="for synonyms: share of the known words that are replaced")


class AugmentAudioConfig(Section):
    """Masks on spectrograms (SpecAugment). Each covers frames or bins in a row with the mean of the spectrogram."""

    time_mask: Fraction = Field(default=0.0, description="largest width of a time mask, as a share of the frames")
    frequency_mask: Fraction = Field(
        default=0.0, description="largest height of a frequency mask, as a share of the bins"
    )
    masks: PositiveInt = Field(default=2, description="masks of each kind on a spectrogram")


class MixConfig(Section):
    """Samples mixed with another one of their batch, for classes. The target has both labels, weighted by share."""

    mixup: Alpha | None = Field(
        default=None,
        description="blend both inputs (mixup): alpha of the Beta distribution of the share, such as 0.2; larger "
        "values mix more; default: no mixup",
    )
    cutmix: Alpha | None = Field(
        default=None,
        description="for images: paste a part of the other one (CutMix): alpha of the Beta distribution of its area, "
        "such as 1.0; default: no CutMix. With mixup, each sample gets one of the two",
    )
    share: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=1.0, description="share of the samples that are mixed"
    )

    @model_validator(mode="after")
    def _mixes(self) -> Self:
        if self.mixup is None and self.cutmix is None:
            raise RecipeError("mix has neither mixup nor cutmix: give one of them an alpha, such as mixup: 0.2").of(
                "mix.empty"
            )
        return self


class AugmentConfig(Section):
    """Random changes of the training samples. Validation sees the samples as they are."""

    image: AugmentImageConfig | None = Field(default=None, description="for images; default: no change")
    text: AugmentTextConfig | None = Field(default=None, description="for texts; default: no change")
    audio: AugmentAudioConfig | None = Field(default=None, description="for spectrograms; default: no change")
    mix: MixConfig | None = Field(default=None, description="for images and numbers with classes; default: no mixing")
