//! The nouns that every part of the protocol shares: nodes, pages, kinds of access,
//! policies.

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Pages of a chunk (2 MiB): the unit of placement, of history and of interleaving.
pub const CHUNK_PAGES: u64 = 512;
/// Most nodes of one aggregate: a set of nodes is a 32-bit bitmap.
pub const NODES_MAX: usize = 32;
/// Page numbers are below this (8 TiB of addresses).
pub const PAGES_MAX: u64 = 1 << 31;

/// A node of the aggregate, below [`NODES_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u8);

impl NodeId {
    /// The set that holds this node alone.
    pub const fn bit(self) -> u32 {
        1 << (self.0 & 31)
    }
    /// The node as an index.
    pub const fn index(self) -> usize {
        (self.0 & 31) as usize
    }
    /// The lowest node of a set; `None` when the set is empty.
    pub const fn lowest(set: u32) -> Option<NodeId> {
        if set == 0 {
            None
        } else {
            Some(NodeId(set.trailing_zeros() as u8))
        }
    }
}

impl core::fmt::Display for NodeId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// A page number: an address divided by [`PAGE_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page(pub u64);

impl Page {
    /// The chunk that the page belongs to.
    pub const fn chunk(self) -> u64 {
        self.0 / CHUNK_PAGES
    }
}

impl core::fmt::Display for Page {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// What a fault or an installed page allows. `Write` includes reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Loads.
    Read,
    /// Loads and stores.
    Write,
}

/// How a page is kept coherent. Alike on all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// Write-invalidate: many readers or one writer.
    #[default]
    Invalidate,
    /// Replicated and never written. The owner (the node that loaded it) keeps
    /// it whatever happens; everybody else may drop a copy at will.
    ReadOnly,
    /// As [`Policy::Invalidate`], for pages that one node writes repeatedly and others
    /// read: a node that lost its copy to a write is notified
    /// ([`crate::Action::Outdated`]) and may ask for the new content before
    /// anybody faults on it. A reader never takes such a page for itself.
    Update,
    /// Every node has its own; never leaves it, no message is sent.
    Private,
}

/// What a node of the aggregate takes part in. Nodes learn of a change one after the
/// other: see `docs/membership.md` for the sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// In nothing: not there yet, or gone. Its number is free.
    Absent,
    /// In everything.
    Present,
    /// It gives away what it has: no page is pushed to it, no manager handed to it.
    Draining,
    /// As [`Standing::Draining`], and it asks for nothing any more.
    Leaving,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_node_of_a_set() {
        assert_eq!(NodeId::lowest(0), None);
        assert_eq!(NodeId::lowest(0b1010), Some(NodeId(1)));
        assert_eq!(NodeId(31).bit(), 1 << 31);
    }
}
