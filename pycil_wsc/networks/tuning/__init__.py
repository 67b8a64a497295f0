"""Adapters, scales, prompts and prefixes in a vision transformer of timm, whose own code stays as it is.

:class:`.transformer.TunedTransformer` holds timm's model and *sets* of small modules. A set acts on all blocks, or on
some; one set is active in a pass, or none::

    tuned = TunedTransformer(self.new_backbone())       # UserError unless it is a VisionTransformer of timm
    tuned.add_blocks(Adapter, hidden=64)                # set 0: an adapter in each block; returns its number
    tuned.add_blocks(Adapter, hidden=64)                # set 1: of the next task
    tuned.add_blocks(LoRA, blocks=range(5), rank=5)     # set 2: in the first five blocks only
    tuned.sets[0].requires_grad_(False)                 # sets are modules: train, freeze, copy, average them

    tuned(images)                                       # (B, d) features with the newest set
    tuned(images, route=0)                              # with another
    tuned(images, route=None)                           # with none: the pre-trained model itself
    tuned(images, route=tasks)                          # with one of each image: int64 (B,), for sets of adapters
    tuned.untuned(images)                               # as route=None, without gradients, from the weights before
                                                        # training, also if the model itself is not frozen
    tuned(images, prefixes={0: (keys, values)})         # further keys and values in block 0: (B or 1, p, dim) each
    tuned(images, prompts=prompts)                      # further tokens from the first block on: (B or 1, p, dim)

``tuned.sets[1]["3"]`` is the module of set 1 in block 3. What can be in a set:

* :class:`.modules.Adapter` parallel to a block's MLP or attention, or after it (AdaptFormer, LAE)
* :class:`.modules.LoRA` of keys and values (LAE)
* :class:`.modules.Prefix`, learned further keys and values (LAE)
* :class:`.modules.Prompts`, ``tuned.add(Prompts(dim, length, depth))``: shallow or deep prompts (VPT)
* :class:`.modules.Scales`, ``tuned.add(Scales(tuned.vit))``: a scale and a shift after each layer (SSF)

:mod:`.pools` has what chooses prompts for an image: pools with keys (L2P, DualPrompt) and weighted components (CODA).

The key ``freeze`` says which parts of timm's model stay as they are, as for other methods; methods that tune from
outside have ``freeze=["backbone"]`` as their default. What a set adds is not frozen.
"""
