//! The switches that cards of a slice have by a name: each host has its own of that name, in the
//! run directory of its daemon or launcher.
//!
//! They are connected to with the rights that the process is started with, before it becomes
//! another user: that directory lets nobody else in. Of somebody else's machine the lender has
//! allowed the name before.

use std::path::Path;

use weft_machine::{Configuration, Network, OpenSwitch, OpenSwitches, SwitchSocket};
use weft_node::rundir;

/// Connects the cards of slice `number` to those in `directory`.
///
/// # Errors
/// What is no name; a switch that is not there.
pub fn connect(
    configuration: &Configuration,
    number: usize,
    directory: &Path,
) -> anyhow::Result<OpenSwitches> {
    let mut connected = OpenSwitches::default();
    for (card, network) in (0..).zip(&configuration.networks) {
        let Network::Switch {
            socket: SwitchSocket::Named(name),
            slice,
            ..
        } = network
        else {
            continue;
        };
        if *slice as usize == number {
            let socket = rundir::switch_socket(directory, name)?;
            connected.insert(card, OpenSwitch::connect(&socket)?);
        }
    }
    Ok(connected)
}
