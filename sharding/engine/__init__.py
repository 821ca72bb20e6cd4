"""The part of the runtime that runs while a module trains: all-gather, compute, reduce, free.

`sharding.fsdp1`, `sharding.fsdp2` and `sharding.composable` turn a user's modules into its units.

[Note: tensor names]
The words for tensors in the engine, with their shapes:

    sharded parameter    this rank's part, the tensor that the optimizer sees
                           ChunkParamGroup: a DTensor; its local tensor has the shape of
                           torch.chunk's piece along `dim`, possibly empty
                           FlatParamGroup: flat, (shard_numel,), with padding; or, for each original
                           parameter, a flat view of its elements in that shard
    unsharded buffer     flat, (numel,), all parameters of the group end to end (unsharded_buffer)
    unsharded parameter  `Parameter.shape`, a view of the unsharded buffer and a leaf of autograd;
                         the modules have it while they compute
    all-gather input     flat, this rank's spans of the unsharded buffer, in `dtype`
    all-gather output    by rank, flat, the ranges of the unsharded buffer that its input fills
    unsharded gradient   `Parameter.shape`, `.grad` of the unsharded parameter
    reduce-scatter input by rank, flat, the part of the unsharded gradients that the rank gets, in
                         `reduce_dtype`; the last tensor has a flag for each parameter
    accumulated grad     `.grad` of the sharded parameter, with the parameter's shape; backwards add
"""
