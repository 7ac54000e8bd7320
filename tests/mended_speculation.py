"""A plugin of vLLM that mends its speculative decoding on CPUs, as it is on GPUs.

vLLM 0.32's build for CPUs divides the logits of guessed tokens by a temperature that it has not
written: `_expand_kernel_impl` of vllm/utils/cpu_triton_utils.py writes it into a copy.
"""


def register():
    """Called by vLLM in each of its processes."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        values = torch.where(x == replace_from, replace_to, x)
        return values.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand
