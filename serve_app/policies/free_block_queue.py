"""A free list behind the methods of vLLM's free queue, which deal in block objects and not in their ids.

Cost: as the free list's.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from serve_app.policies.eviction import FreeBlocks


class HasBlockId(Protocol):
    """What is asked of vLLM's `KVCacheBlock`."""

    block_id: int


Block = TypeVar("Block", bound=HasBlockId)
Free = TypeVar("Free", bound=FreeBlocks)


class FreeBlockQueue(Generic[Block, Free]):
    """A free list in the place of vLLM's `FreeKVCacheBlockQueue`; blocks in, blocks out.

    Where a block is put, in front or at the end, means nothing: the free list knows itself which are cached.
    """

    def __init__(self, blocks: list[Block], free: Free) -> None:
        self._blocks = blocks
        self.free = free

    @property
    def num_free_blocks(self) -> int:
        return self.free.num_free

    def popleft(self) -> Block:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        blocks = self._blocks
        return [blocks[block_id] for block_id in self.free.take(n)]

    def remove(self, block: Block) -> None:
        self.free.claim(block.block_id)

    def append(self, block: Block) -> None:
        self.free.release([block.block_id])

    def append_n(self, blocks: list[Block]) -> None:
        self.free.release([block.block_id for block in blocks])

    prepend_n = append_n

    def get_all_free_blocks(self) -> list[Block]:
        return [self._blocks[block_id] for block_id in self.free.free_blocks()]

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """The free blocks, likely sooner reused first; from the start again when `cursor` is no longer free."""
        free = self.free.free_blocks()
        start = free.index(cursor.block_id) + 1 if cursor is not None and self.free.is_free(cursor.block_id) else 0
        return (self._blocks[block_id] for block_id in free[start:])
