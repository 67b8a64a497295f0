"""Adapters, scales, prompts and prefixes in a vision transformer of timm, whose own code stays as it is.

:class:`.transformer.TunedTransformer` holds timm's model and *sets* of small modules. A set acts on all blocks, or on
some; one set is active in a pass, or none::

    tuned = TunedTransformer(self.new_backbone())       # UserError unless it is a VisionTransformer of timm
    tuned.add_blocks(Adapter, hidden=64)                # set 0: an adapter in each block
    tuned.add_blocks(Adapter, hidden=64)                # set 1: of the next task
    tuned.add_blocks(LoRA, blocks=range(5), rank=5)     # set 2: in the first five blocks only
    tuned.sets[0].requires_grad_(False)                 # sets are modules: train, freeze, copy, average them

    tuned(images)                                       # (B, d) features with the newest set
    tuned(images, route=0)                              # with another
    tuned(images, route=None)                           # with none: the pre-trained model itself
    tuned.untuned(images)                               # as route=None, without gradients, from the weights before
                                                        # training, also if the model itself is not frozen
    tuned(images, prefixes={0: (keys, values)})         # further keys and values in block 0: (B or 1, p, dim) each
    tuned.tokens(images, prompts=prompts)               # with further tokens from the first block on: (B, n, dim)

``tuned.sets[1]["3"]`` is the module of set 1 in block 3. Sets of all blocks at once are ``Prompts(tuned.dim, length,
depth)`` and ``Scales(tuned.vit)``; append them to ``tuned.sets``. :mod:`.modules` has what acts in blocks, and
:mod:`.pools` what chooses prompts for an image.

The key ``freeze`` says which parts of timm's model stay as they are, as for other methods; methods that tune from
outside have ``freeze=["backbone"]`` as their default. What a set adds is not frozen.
"""
