//! What is fuzzed.
//!
//! A target takes any bytes and must return: a panic, a crash or a hang is a finding.
//! Each target has a generator of valid inputs. Its seed corpus (`corpus/NAME`) comes
//! from this generator, and the driver takes pieces from it (`guided.rs`). To add a
//! target, add an entry to [`TARGETS`], then run `.ci/fuzz seeds NAME`.

pub mod cluster;
pub mod dsm;
pub mod node;
pub mod proc;
pub mod random;
pub mod soft;
pub mod soft_guest;
pub mod soft_memory;
pub mod soft_walk;
pub mod switch;
pub mod vmm_boot;
pub mod vmm_checkpoint;
pub mod vmm_devices;
pub mod vmm_slice;
pub mod web;
pub mod wire;

use random::Random;

/// Something to fuzz.
pub struct Target {
    /// Name, `ROOM-WHAT`, which is its folder's in the corpus, too.
    pub name: &'static str,
    /// Feeds it one input.
    pub run: fn(&[u8]),
    /// Makes a valid input.
    pub valid: fn(&mut Random) -> Vec<u8>,
}

/// The target of this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target {
        name: "cluster-state",
        run: cluster::state,
        valid: cluster::valid_state,
    },
    Target {
        name: "cluster-token",
        run: cluster::token,
        valid: cluster::valid_token,
    },
    Target {
        name: "web-gateway",
        run: web::gateway,
        valid: web::valid_calls,
    },
    Target {
        name: "switch-messages",
        run: switch::messages,
        valid: switch::valid_messages,
    },
    Target {
        name: "wire-frame",
        run: wire::frame,
        valid: wire::valid_frames,
    },
    Target {
        name: "wire-stream",
        run: wire::stream,
        valid: wire::valid_frames,
    },
    Target {
        name: "wire-sealed-inside",
        run: wire::sealed_inside,
        valid: wire::valid_frames,
    },
    Target {
        name: "wire-sealed",
        run: wire::sealed,
        valid: wire::valid_records,
    },
    Target {
        name: "wire-ring",
        run: wire::ring,
        valid: wire::valid_ring,
    },
    Target {
        name: "wire-hello",
        run: wire::hello,
        valid: wire::valid_hello,
    },
    Target {
        name: "wire-channel",
        run: wire::channel,
        valid: wire::valid_channel,
    },
    Target {
        name: "wire-handshake",
        run: wire::handshake,
        valid: wire::valid_handshake,
    },
    Target {
        name: "dsm-message",
        run: dsm::message,
        valid: dsm::valid_messages,
    },
    Target {
        name: "dsm-node",
        run: dsm::node,
        valid: dsm::valid_messages,
    },
    Target {
        name: "proc-program",
        run: proc::program,
        valid: proc::valid_program,
    },
    Target {
        name: "proc-script",
        run: proc::script_line,
        valid: proc::valid_script,
    },
    Target {
        name: "proc-request",
        run: proc::request,
        valid: proc::valid_request,
    },
    Target {
        name: "proc-reply",
        run: proc::reply,
        valid: proc::valid_reply,
    },
    Target {
        name: "proc-jump",
        run: proc::jump,
        valid: proc::valid_jump,
    },
    Target {
        name: "node-config",
        run: node::config,
        valid: node::valid_config,
    },
    Target {
        name: "node-session",
        run: node::session,
        valid: node::valid_session,
    },
    Target {
        name: "vmm-slice-message",
        run: vmm_slice::message,
        valid: vmm_slice::valid_messages,
    },
    Target {
        name: "vmm-slice-places",
        run: vmm_slice::places,
        valid: vmm_slice::valid_messages,
    },
    Target {
        name: "vmm-slice-text",
        run: vmm_slice::text,
        valid: vmm_slice::valid_texts,
    },
    Target {
        name: "vmm-slice-frames",
        run: vmm_slice::frames,
        valid: vmm_slice::valid_frames,
    },
    Target {
        name: "vmm-boot-image",
        run: vmm_boot::image,
        valid: vmm_boot::valid_image,
    },
    Target {
        name: "vmm-virtqueue-block",
        run: vmm_devices::block,
        valid: vmm_devices::valid_block,
    },
    Target {
        name: "vmm-virtqueue-net",
        run: vmm_devices::net,
        valid: vmm_devices::valid_net,
    },
    Target {
        name: "vmm-virtqueue-console",
        run: vmm_devices::console,
        valid: vmm_devices::valid_console,
    },
    Target {
        name: "vmm-virtqueue-rng",
        run: vmm_devices::rng,
        valid: vmm_devices::valid_rng,
    },
    Target {
        name: "vmm-virtqueue-balloon",
        run: vmm_devices::balloon,
        valid: vmm_devices::valid_balloon,
    },
    Target {
        name: "vmm-pci-config",
        run: vmm_devices::pci,
        valid: vmm_devices::valid_pci,
    },
    Target {
        name: "soft-code",
        run: soft::code,
        valid: soft::valid_code,
    },
    Target {
        name: "soft-walk",
        run: soft::walk,
        valid: soft::valid_tables,
    },
    Target {
        name: "vmm-checkpoint-pages",
        run: vmm_checkpoint::pages,
        valid: vmm_checkpoint::valid_pages,
    },
    Target {
        name: "vmm-checkpoint-manifest",
        run: vmm_checkpoint::manifest,
        valid: vmm_checkpoint::valid_manifest,
    },
];
