"""What can be trained: functions that return a ``torch.nn.Module``, named in a recipe by import string.

A factory gets ``model.args``, and of what the data knows (``num_labels`` of classes; ``vocab_size`` and
``max_length`` of texts; ``channels`` and ``image_size`` of images) the arguments that it names.
The model takes the data's tensors by name and answers logits, or an output with ``logits``.
"""
