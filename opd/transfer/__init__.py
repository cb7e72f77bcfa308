"""Weights straight from the trainer's memory into the engines' processes: what both ends of a direct push share.

    rank 0   gather 1 ─fill─ gather 2 ─fill─ ...         all ranks gather in step
                       └─ broadcast ─┬─ engine process          NCCL between GPUs, gloo between CPUs
                                     └─ engine process
    rank r   gather 1 ─fill─ ...
                       └─ handle ────── engine process on rank r's GPU, which copies out of the rank's memory (CUDA IPC)

routes    which way the weights take into each process of an engine
channel   the signals between processes, and the group that broadcasts
handles   a buffer that another process on the same GPU reads

No host memory and no file is on the way. vLLM has weight transfer of its own (`vllm.distributed.weight_transfer`), whose groups are
NCCL's alone. So the group here is torch's, with the backend of the device; the engine loads by the same functions of vLLM.
"""
