"""The parameter layout of a cubin, read from its ELF: what the driver would report, without a driver."""

import struct

_SIZED = 4  # the format of an attribute whose value has a size of its own
_KPARAM_INFO = 0x17


def read_layout(cubin, symbol):
    """``[(offset, size), ...]`` in bytes of the parameters of kernel ``symbol``; ``ValueError`` if it is not there."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    wanted = f".nv.info.{symbol}".encode()
    for name, _, _, _, offset, size in headers:
        start = names + name
        if cubin[start : cubin.index(b"\0", start)] == wanted:
            return _params(cubin[offset : offset + size])
    raise ValueError(f"no kernel {symbol}")


def _params(info):
    params = {}
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", info, at)
            params[ordinal] = (offset, flags >> 18)
        at += size
    return [params[ordinal] for ordinal in sorted(params)]
