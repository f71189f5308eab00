//! `--growable`: whether nodes can join a machine that starts on one node.

use super::args::{BackEndArg, GrowableArg, VmRunArgs};
use super::error::VmError;

/// Whether the memory of a machine of one node gets a controller. That of several has one
/// anyway.
pub fn is_growable(args: &VmRunArgs, nodes: usize) -> Result<bool, VmError> {
    match args.growable {
        GrowableArg::No => Ok(false),
        _ if nodes > 1 => Ok(false),
        GrowableArg::Yes if args.deterministic => Err(wrong(
            "a deterministic machine stays on one node: it has a single order of instructions",
        )),
        GrowableArg::Yes if args.backend == BackEndArg::Kvm => Err(wrong(
            "a machine of one node in KVM stays on it: use --backend soft or --nodes 2",
        )),
        GrowableArg::Yes => Ok(true),
    }
}

fn wrong(what: &str) -> VmError {
    VmError::Option(format!("--growable: {what}"))
}
