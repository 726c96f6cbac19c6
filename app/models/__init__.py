"""What can be trained: functions that return a ``torch.nn.Module``, named in a recipe by import string.

A factory gets ``model.args``, and of what the data knows (``num_labels``; ``vocab_size`` and
``max_length`` for texts; ``channels`` and ``image_size`` for images) the arguments that it names.
The model takes the processor's tensors by name and answers logits, or an output with ``logits``.
"""
