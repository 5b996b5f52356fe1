"""Build a phase as one CUDA graph, node by node, and launch phases eagerly with the same kernels.

The nodes of a rank form a chain, which joins any two calls that share a range by a full-completion path; branches in decode
were measured and gain nothing (docs/performance.md). The ranks' chains are ordered by the exchanges alone. Where the device has
programmatic edges, a node may start while its predecessor drains; each block waits (griddepcontrol.wait) before it touches
what the predecessor wrote.

Exchanges between halves of a prefill chunk stand beside the chain, one after the other: each begins when what stands in front
of it in the chain is complete, and the chain awaits it at the first call that depends on it. These edges are ordinary ones.
"""

from __future__ import annotations

from typing import Any, Protocol

from compiler.program.model import Call, Phase
from runtime.cuda.device import Device
from runtime.cuda.driver import api, call
from runtime.cuda.modules import Modules, PackedArgs, describe, launch_kernel


class StagingLike(Protocol):
    """Copies of a staged exchange: (rank, destination, source, bytes) in front of the first call of its pair."""

    def is_exchange(self, item: Call) -> bool: ...
    def pulls(self, phase: Phase, item: Call) -> list[tuple[int, int, int, int]] | None: ...


def joins(phase: Phase, programmatic: bool) -> dict[int, list[tuple[int, bool]]]:
    """By call index: the earlier calls of its rank that its node is joined to, and whether by a programmatic edge."""
    out: dict[int, list[tuple[int, bool]]] = {}
    chain: dict[int, int] = {}  # rank -> last call of its chain
    running: dict[int, list[int]] = {}  # rank -> calls beside it that it has not awaited yet, in order
    for item in phase.calls:
        mine = running.setdefault(item.rank, [])
        front = [chain[item.rank]] if item.rank in chain else []
        if item.beside:
            out[item.index] = [(index, False) for index in (*front, *mine[-1:])]
            mine.append(item.index)
            continue
        awaited = [place for place, index in enumerate(mine) if index in item.deps][-1:]  # the last one comes after the others
        early = programmatic and item.programmatic and not awaited
        out[item.index] = [(index, early) for index in front] + [(mine[place], False) for place in awaited]
        for place in awaited:
            del mine[: place + 1]
        chain[item.rank] = item.index
    return out


class GraphPhase:
    """An instantiated graph of one phase."""

    def __init__(self, phase: Phase, modules: Modules, args: list[PackedArgs], devices: list[Device],
                 programmatic: bool, staging: StagingLike | None = None) -> None:  # fmt: skip
        driver = api()
        copies: list[Any] = []
        devices[0].activate()
        self._graph = call(driver.cuGraphCreate(0), f"graph {phase.name}")
        last: dict[int, Any] = {}
        nodes: dict[int, Any] = {}
        before = joins(phase, programmatic)
        for item, packed in zip(phase.calls, args, strict=True):
            params = driver.CUDA_KERNEL_NODE_PARAMS()
            params.kern = modules.kernels[item.entry]
            params.ctx = devices[item.rank].context
            params.gridDimX, params.gridDimY, params.gridDimZ = item.grid
            params.blockDimX, params.blockDimY, params.blockDimZ = item.block, 1, 1
            params.sharedMemBytes = item.smem
            params.kernelParams = packed.address
            node = nodes[item.index] = call(driver.cuGraphAddKernelNode(self._graph, [], 0, params), describe(item))
            if item.beside:
                self._prefer(node, describe(item))
            if item.cluster != (1, 1, 1):
                value = driver.CUkernelNodeAttrValue()
                value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = item.cluster
                attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                call(driver.cuGraphKernelNodeSetAttribute(node, attribute, value), describe(item))
            if staging is not None and staging.is_exchange(item):
                pulls = staging.pulls(phase, item)
                if pulls is not None:
                    copies = [self._copy(devices[pull[0]], *pull[1:], list(last.values())) for pull in pulls]
                for copy in copies:  # both: the peer's contribution has arrived, and the own one has been read
                    self._join(copy, node, False, describe(item))
                last[item.rank] = node
                continue
            for index, early in before[item.index]:
                self._join(nodes[index], node, early, describe(item))
            last[item.rank] = node
        self._exec = call(driver.cuGraphInstantiate(self._graph, 0), f"graph {phase.name}: instantiate")
        self._name = phase.name

    def _copy(self, device: Device, target: int, source: int, nbytes: int, after: list[Any]) -> Any:
        """A copy node that runs once every rank has done what stands before it."""
        driver = api()
        params = driver.CUDA_MEMCPY3D()
        params.srcMemoryType = params.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        params.srcDevice, params.dstDevice = source, target
        params.WidthInBytes, params.Height, params.Depth = nbytes, 1, 1
        return call(driver.cuGraphAddMemcpyNode(self._graph, after, len(after), params, device.context), "exchange copy")

    @staticmethod
    def _prefer(node: Any, what: str) -> None:
        """Blocks of ``node`` take the next room that comes free: all blocks of a product would stand in front of them."""
        driver = api()
        value = driver.CUkernelNodeAttrValue()
        _, value.priority = call(driver.cuCtxGetStreamPriorityRange(), "priorities")
        call(driver.cuGraphKernelNodeSetAttribute(node, driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY, value), what)

    def _join(self, before: Any, after: Any, programmatic: bool, what: str) -> None:
        driver = api()
        edge = driver.CUgraphEdgeData()
        if programmatic:
            edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
            edge.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value
        call(driver.cuGraphAddDependencies(self._graph, [before], [after], [edge], 1), what)

    def launch(self, device: Device) -> None:
        call(api().cuGraphLaunch(self._exec, device.stream), f"graph {self._name}")

    def close(self) -> None:
        api().cuGraphExecDestroy(self._exec)
        api().cuGraphDestroy(self._graph)


class EagerPhase:
    """The same calls as stream launches (``--no-cuda-graph``)."""

    def __init__(self, phase: Phase, modules: Modules, args: list[PackedArgs], devices: list[Device],
                 staging: StagingLike | None = None) -> None:  # fmt: skip
        self._staging = staging
        self._phase, self._modules, self._args, self._devices = phase, modules, args, devices

    def launch(self, device: Device) -> None:
        driver = api()
        for item, packed in zip(self._phase.calls, self._args, strict=True):
            target = self._devices[item.rank]
            if self._staging is not None and (pulls := self._staging.pulls(self._phase, item)) is not None:
                self._settle()
                for rank, destination, source, nbytes in pulls:
                    self._devices[rank].activate()
                    call(driver.cuMemcpyAsync(destination, source, nbytes, self._devices[rank].stream), "exchange copy")
                self._settle()
            target.activate()
            launch_kernel(self._modules.kernels[item.entry], target.stream, item.grid, item.block, item.smem, packed,
                          describe(item), item.cluster)  # fmt: skip

    def _settle(self) -> None:
        for device in self._devices:
            device.synchronize()

    def close(self) -> None:
        return None
