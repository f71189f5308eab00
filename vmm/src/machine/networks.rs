//! The networks of a configuration, as one slice sees them. The slice that has a
//! network serves its queues; the bootstrap slice shows it to the guest.

use std::sync::Arc;

use super::MachineError;
use super::configuration::{Configuration, DataPath, Network};
use crate::slice::delegation::Scheme;
use crate::slice::{BOOTSTRAP, Slice};
use crate::virtio::VirtioDevice;
use crate::virtio::net::{self, FarNet, Net, NetBackEnd, NetDescription, NetOptions, PAIRS_MAX};

/// A device with who serves it.
pub(super) type Placed = (Scheme, Box<dyn VirtioDevice>);

/// Opens the networks of a machine on one node.
pub(super) fn open(configuration: &Configuration) -> Result<Vec<Net>, MachineError> {
    let networks = (0..).zip(&configuration.networks);
    let open = |(number, network)| Ok(Net::open(&options(configuration, number, network))?);
    networks.map(open).collect()
}

/// Opens what lies on `slice`; what does not is only shown. As for disks, each slice
/// tells first and listens then.
pub(super) fn open_for(
    configuration: &Configuration,
    slice: &Arc<Slice>,
) -> Result<Vec<Placed>, MachineError> {
    let mut here = Vec::new();
    for (number, network) in (0..).zip(&configuration.networks) {
        let mut options = options(configuration, number, network);
        let owner = network.slice() as usize;
        if owner != BOOTSTRAP {
            // The queue that asks for more pairs would be served apart from them.
            options.pairs = 1;
        }
        let scheme = Scheme::new(slice.placement(), owner, DataPath::Dsm, options.pairs, 2);
        let open = (owner == slice.number())
            .then(|| Net::open(&options))
            .transpose()?;
        if let Some(net) = &open {
            // It is plain data: it always has a text.
            slice.describe(serde_json::to_vec(&net.describe()).unwrap_or_default());
        }
        here.push((scheme, open));
    }
    let first = configuration.disks.len();
    let mut all = Vec::new();
    for (number, (scheme, open)) in here.into_iter().enumerate() {
        slice
            .delegation()
            .add_scheme((first + number) as u8, &scheme);
        let device: Box<dyn VirtioDevice> = match open {
            Some(net) => Box::new(net),
            None => Box::new(FarNet::new(described(slice, scheme.owner(), number)?)),
        };
        all.push((scheme, device));
    }
    Ok(all)
}

fn described(slice: &Slice, owner: usize, number: usize) -> Result<NetDescription, MachineError> {
    let wrong = |reason| MachineError::Described {
        slice: owner,
        device: "network",
        number,
        reason,
    };
    let json = slice.next_description(owner).map_err(wrong)?;
    serde_json::from_slice(&json).map_err(|error| wrong(error.to_string()))
}

fn options(configuration: &Configuration, number: u16, network: &Network) -> NetOptions {
    let options = match network {
        Network::Tap { name, .. } => NetOptions {
            pairs: configuration.cpus.min(PAIRS_MAX.into()) as u16,
            ..NetOptions::new(NetBackEnd::Tap { name: name.clone() })
        },
        Network::User {
            forwards,
            reaches_host,
            ..
        } => {
            let forwards = forwards.iter().map(|forward| net::Forward {
                host: forward.host_port,
                guest: forward.guest_port,
            });
            NetOptions::new(NetBackEnd::User(net::User {
                forwards: forwards.collect(),
                reaches_host: *reaches_host,
                ..net::User::default()
            }))
        }
    };
    NetOptions { number, ..options }
}
