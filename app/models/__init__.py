"""Trainable models: functions that return a ``torch.nn.Module``, named in a recipe by their import string.

A factory receives ``model.args``, plus those properties of the data that its signature names: ``num_labels`` of
classes, ``vocab_size`` and ``max_length`` of texts, ``channels`` and ``image_size`` of images. The model takes the
data's tensors by name, and returns logits or an output with ``logits``.
"""
