//! How a vCPU and the device that it uses are to each other.

/// From nearest to farthest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// One node has all.
    Local,
    /// Two nodes, and the vCPU's has the device: nothing is delegated.
    Beside,
    /// The other node has the device, and its data go past the shared memory.
    Bypass,
    /// The other node has the device, and its queues are in the shared memory.
    Dsm,
}

impl Way {
    pub const ALL: [Way; 4] = [Way::Local, Way::Beside, Way::Bypass, Way::Dsm];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Way::Local => "local",
            Way::Beside => "beside",
            Way::Bypass => "bypass",
            Way::Dsm => "dsm",
        }
    }

    /// What goes behind the device's option of `weft vm run` when vCPU 1 uses it.
    pub fn place(self) -> &'static str {
        match self {
            Way::Local => "",
            Way::Beside => ",node=1",
            Way::Bypass => ",node=0,path=bypass",
            Way::Dsm => ",node=0,path=dsm",
        }
    }
}
