"""Models for audio."""

from torch import Tensor, nn

_LEVELS = 3


class SpectrogramCnn(nn.Module):
    """A classifier of spectrograms: three convolutions that halve them, a mean over time and a linear layer.

    The mean is over time only and keeps the mel bins apart, because pitch distinguishes sounds.
    """

    def __init__(self, num_labels: int, bins: int, width: int = 16) -> None:
        """Create the model with random weights.

        Args:
            num_labels: number of classes.
            bins: mel bins of a frame.
            width: output channels of the first convolution. Each later one has ``width`` more.
        """
        super().__init__()
        layers: list[nn.Module] = []
        for level in range(_LEVELS):
            layers += [nn.Conv2d(width * level or 1, width * (level + 1), 3, stride=2, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(_LEVELS * width * -(-bins // 2**_LEVELS), num_labels)

    def forward(self, log_mel: Tensor) -> Tensor:
        """Return logits (batch, labels) for spectrograms (batch, bins, frames)."""
        logits: Tensor = self.classifier(self.features(log_mel[:, None]).mean(-1).flatten(1))
        return logits


spectrogram_cnn = SpectrogramCnn
