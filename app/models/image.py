"""Models of images."""

from torch import Tensor, nn


class SmallCnn(nn.Module):
    """A classifier of small images: convolutions of doubling width, a mean over the image and a linear layer."""

    def __init__(self, num_labels: int, channels: int, width: int = 32, poolings: int = 1) -> None:
        """Create the model with fresh weights.

        Args:
            num_labels: number of classes.
            channels: channels of an image.
            width: output channels of the first convolution, a multiple of 8.
            poolings: times that the image is halved, with one more convolution each: 1 for 8 x 8 pixels, 2 for 28 x 28.
        """
        super().__init__()
        if width % 8:
            raise ValueError(f"width {width} is not a multiple of 8")
        if poolings < 1:
            raise ValueError(f"poolings {poolings} is less than 1")
        layers = [_convolution(channels, width)]
        for _ in range(poolings):
            layers += [_convolution(width, 2 * width), nn.MaxPool2d(2)]
            width *= 2
        layers += [_convolution(width, 2 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(2 * width, num_labels)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return logits (batch, labels) for pixels (batch, channels, height, width)."""
        logits: Tensor = self.classifier(self.features(pixel_values))
        return logits


def _convolution(channels: int, width: int) -> nn.Module:
    # Group norm: with batch norm the statistics, and so the loss, would depend on the micro-batch.
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.GroupNorm(8, width), nn.GELU())


small_cnn = SmallCnn


def resnet50(num_labels: int, channels: int) -> nn.Module:
    """Return ResNet-50 (He et al. 2015, arXiv:1512.03385) of Hugging Face ``transformers``, with fresh weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model: nn.Module = ResNetForImageClassification(ResNetConfig(num_channels=channels, num_labels=num_labels))
    return model
