"""The recipe's ``train.augment``: random changes of the training samples."""

from typing import Annotated

from pydantic import Field, PositiveInt

from app.config.section import Fraction, Section

Share = Annotated[float, Field(gt=0.0, le=1.0)]


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
    synonyms: str | None = Field(
        default=None, description="file of words that may stand for each other: a group a line, separated by commas"
    )
    synonym_share: Fraction = Field(default=0.1, description="for synonyms: share of the known words that are replaced")


class AugmentConfig(Section):
    """Random changes of the training samples. Validation sees the samples as they are."""

    image: AugmentImageConfig | None = Field(default=None, description="for images; default: no change")
    text: AugmentTextConfig | None = Field(default=None, description="for texts; default: no change")
