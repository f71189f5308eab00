//! `--growable`: whether nodes can join a machine that starts on one node.

use weft_vcpu_kvm::detect::Backend;

use super::args::{BackEndArg, VmRunArgs};
use super::choices::GrowableArg;
use super::error::VmError;

/// Whether the memory of a machine of one node gets a controller. That of several has one
/// anyway.
pub fn is_growable(args: &VmRunArgs, nodes: usize) -> Result<bool, VmError> {
    match args.growable {
        GrowableArg::No => Ok(false),
        _ if nodes > 1 => Ok(false),
        GrowableArg::Auto => Ok(!args.deterministic && is_software(args.backend)),
        GrowableArg::Yes if args.deterministic => Err(wrong(
            "a deterministic machine stays on one node: it has a single order of instructions",
        )),
        GrowableArg::Yes if args.backend == BackEndArg::Kvm => Err(wrong(
            "a machine of one node in KVM stays on it: use --backend soft or --nodes 2",
        )),
        GrowableArg::Yes => Ok(true),
    }
}

/// Whether vCPUs are software, as far as the options leave a choice.
fn is_software(choice: BackEndArg) -> bool {
    match choice {
        BackEndArg::Kvm => false,
        BackEndArg::Soft => true,
        // Without a wish there is always one.
        BackEndArg::Auto => Backend::choose(None)
            .as_ref()
            .is_ok_and(|choice| choice.backend() == Backend::Soft),
    }
}

fn wrong(what: &str) -> VmError {
    VmError::Option(format!("--growable: {what}"))
}
