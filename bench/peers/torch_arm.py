"""What PyTorch arms on the CPU or CUDA share: arguments, the measured window and its memory, digests of tensors."""

import ctypes
import gc
import hashlib
import sys
import time

import arm
import torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def add_arguments(parser):
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="f32", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")


def set_up(args):
    """Threads and device; the fingerprint, to which the caller adds its own settings."""
    torch.set_num_threads(args.threads)
    fingerprint = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": args.device,
        "dtype": args.dtype,
        "compile": args.compile,
        "f32_products": torch.get_float32_matmul_precision(),
    }
    if args.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda: this PyTorch sees no CUDA device")
        fingerprint.update(gpu=torch.cuda.get_device_name(), cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
        fingerprint["memory"] = "allocated by PyTorch"
    else:
        fingerprint["cpu"] = torch.backends.cpu.get_cpu_capability()
        fingerprint["blas"] = "mkl" if torch.backends.mkl.is_available() else "other"
        fingerprint["memory"] = "resident" if _restart_high_water() else "none"
    return fingerprint


def tensor(inputs, index, name, shape, dtype=torch.float32):
    """One input file of `prepare`, in the shape that the parameters ask for."""
    found = [i for i in inputs if i["index"] == index and i["name"] == name]
    if not found:
        raise ValueError(f"the plan gives no tensor `{name}`")
    return torch.frombuffer(bytearray(arm.read(found[0])), dtype=dtype).view(shape)


def indices(inputs):
    return sorted({i["index"] for i in inputs})


def measure(device, work, memory):
    """Runs work() once: the answer's times and bytes, and what work returned.

    memory asks for bytes on the CPU, which are told of the resident pages: those that earlier calls freed go back to the system first, and
    faulting them in again takes time. So an arm asks in its first call alone, which no ratio of times uses, and a plan has
    `memory.mode = "fresh"`. CUDA's allocator counts what is allocated and not what it caches; there every call tells, and keeps its cache.
    """
    gc.collect()
    answer = {}
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        answer["live_bytes"] = torch.cuda.memory_allocated()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start = time.perf_counter_ns()
        begin.record()
        result = work()
        end.record()
        end.synchronize()
        answer["ns"] = time.perf_counter_ns() - start
        answer["device_ns"] = round(begin.elapsed_time(end) * 1e6)
        answer["peak_bytes"] = torch.cuda.max_memory_allocated()
        return answer, result
    if memory:
        _trim()
        memory = _restart_high_water()
        live = _status("VmRSS")
    start = time.perf_counter_ns()
    result = work()
    answer["ns"] = time.perf_counter_ns() - start
    if memory and live is not None:
        # The kernel counts pages in batches, so the mark can lag the start by a few.
        answer.update(live_bytes=live, peak_bytes=max(live, _status("VmHWM")))
    return answer, result


def digest(*tensors):
    """SHA-256 of the bytes of tensors, in the dtype they have."""
    sum = hashlib.sha256()
    for one in tensors:
        one = one.detach().contiguous().cpu()
        sum.update(ctypes.string_at(one.data_ptr(), one.numel() * one.element_size()))
    return sum.hexdigest()


def norm(tensor):
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32 if tensor.is_cuda else torch.float64).item()


def _status(key):
    """Bytes of one line of /proc/self/status, or None where there is none."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _restart_high_water():
    """Sets VmHWM back to what is resident now: without it the peak of an earlier call would be told."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return True
    except OSError:
        return False


def _trim():
    """Free pages go back to the system, as an emptied cache does."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass
