//! What of its host the slice of a machine opens for a launcher on another host: what
//! its lender allows, and nothing else.
//!
//! The launcher's settings are judged here, where they are carried out: they come from
//! somebody else. All of them are, before anything is opened.

use anyhow::{Context, ensure};
use weft_machine::{BackEndChoice, Configuration, Network, OpenDisks, SwitchSocket};
use weft_node::consent::Lender;

/// Adds the disks of slice `number` to `open`, and refuses it if its lender does not allow a
/// disk or network of its.
///
/// # Errors
/// The first that is not allowed, with the line that would allow it; the first that
/// cannot be opened.
pub fn open(
    configuration: &Configuration,
    number: usize,
    lender: &Lender,
    mut open: OpenDisks,
) -> anyhow::Result<OpenDisks> {
    ensure!(
        configuration.back_end != BackEndChoice::Kvm,
        "the lender does not lend KVM: use --backend soft"
    );
    let here = |slice: u32| slice as usize == number;
    check_networks(configuration, number, lender)?;
    let disks = configuration.disks.iter().enumerate();
    let mut permitted = Vec::new();
    for (index, disk) in disks.filter(|(_, disk)| here(disk.slice)) {
        let permit = lender.disk(&disk.path, !disk.read_only)?;
        permitted.push((index, disk.open_flags(), permit));
    }
    for (index, flags, permit) in permitted {
        let path = configuration.disks[index].path.display();
        let file = permit.open(flags);
        let file = file.with_context(|| format!("cannot open disk {path}"))?;
        open.insert(index, file);
    }
    configuration.try_disks(number, &open)?;
    Ok(open)
}

/// Refuses slice `number` if its lender does not allow a network of its.
///
/// # Errors
/// The first that is not allowed, with the line that would allow it.
pub fn check_networks(
    configuration: &Configuration,
    number: usize,
    lender: &Lender,
) -> anyhow::Result<()> {
    let networks = configuration.networks.iter();
    let mut here = networks.filter(|network| network.slice() as usize == number);
    here.try_for_each(|network| allowed(network, lender))
}

fn allowed(network: &Network, lender: &Lender) -> anyhow::Result<()> {
    match network {
        Network::Tap { name, .. } => lender.tap(name)?,
        Network::Switch { socket, .. } => match socket {
            SwitchSocket::At(path) => lender.switch(path)?,
            SwitchSocket::Named(name) => lender.named_switch(name)?,
        },
        Network::User {
            forwards,
            reaches_host,
            ..
        } => {
            let ports: Vec<u16> = forwards.iter().map(|forward| forward.host_port).collect();
            lender.user_network(*reaches_host, &ports)?;
        }
    }
    Ok(())
}
