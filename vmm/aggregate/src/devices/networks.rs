//! Networks: links that lie here are opened, the ways to those of others made.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::remote_devices::QueuePlacement;
use crate::remote_devices::net::{NetworkFront, window};
use crate::{PRIMARY, Slice};
use weft_virtio::net::{
    Mac, Net, NetBackEnd, NetDescription, NetOptions, OpenSwitch, Opened, PAIRS_MAX, Use,
};
use weft_virtio::{VirtioDevice, net};

use super::DeviceSetupError;
use super::{DataPath, DeviceList, Network, Placed, SwitchSocket};

/// Connections to switches that were made before the machine was put together, by the number of
/// the network: to those that have a name.
#[derive(Debug, Default)]
pub struct OpenSwitches(BTreeMap<u16, OpenSwitch>);

impl OpenSwitches {
    /// This connection is that network's.
    pub fn insert(&mut self, network: u16, connection: OpenSwitch) {
        self.0.insert(network, connection);
    }
}

/// A network as far as it is known before the other slices were heard.
struct Begun {
    placement: QueuePlacement,
    /// Pairs of queues.
    pairs: u16,
    open: Option<Here>,
}

/// One that lies here.
enum Here {
    /// Served here alone.
    Alone(Net),
    /// Served by several slices.
    Among(Opened),
}

impl DeviceList<'_> {
    /// Opens the networks of a machine on one node.
    ///
    /// # Errors
    /// The first that cannot be opened.
    pub fn open_networks(&self, switches: &OpenSwitches) -> Result<Vec<Net>, DeviceSetupError> {
        let networks = (0..).zip(self.networks);
        let open = |(number, network)| Ok(Net::open(&options((self, switches), number, network))?);
        networks.map(open).collect()
    }

    /// Opens the networks that lie on `slice`, and makes the ways to those that do not.
    ///
    /// # Errors
    /// The first network that cannot be had.
    pub fn networks_of_slice(
        &self,
        slice: &Arc<Slice>,
        switches: &OpenSwitches,
    ) -> Result<Vec<Placed>, DeviceSetupError> {
        let networks = (0..).zip(self.networks);
        let begun = networks
            .map(|(number, network)| begin((self, switches), slice, number, network))
            .collect::<Result<Vec<_>, _>>()?;
        let ways = begun.iter().map(|begun| usize::from(begun.pairs)).sum();
        let first = self.disks.len();
        let mut all = Vec::new();
        for (number, begun) in begun.into_iter().enumerate() {
            let device = (first + number) as u8;
            let remote = slice.remote_devices();
            remote.add_placement(device, format!("network {number}"), &begun.placement);
            let placement = begun.placement.clone();
            let made = make(slice, (device, number), begun, window(ways))?;
            remote.add_configuration(device, made.configuration());
            all.push((placement, made));
        }
        Ok(all)
    }
}

/// Opens a network that lies here and tells the others of it.
fn begin(
    (list, switches): (&DeviceList<'_>, &OpenSwitches),
    slice: &Arc<Slice>,
    number: u16,
    network: &Network,
) -> Result<Begun, DeviceSetupError> {
    let owner = network.slice() as usize;
    let mut options = options((list, switches), number, network);
    let placement = place(slice, network, pairs(list), &mut options.pairs);
    let open = match owner == slice.number() {
        false => None,
        true if placement.is_shared() => Some(Here::Among(Net::open_one_link(&options)?)),
        true => Some(Here::Alone(Net::open(&options)?)),
    };
    let description = open.as_ref().map(|open| match open {
        Here::Alone(net) => net.describe(),
        Here::Among(opened) => opened.description.clone(),
    });
    if let Some(description) = description {
        // It is plain data: it always has a text.
        slice.describe(serde_json::to_vec(&description).unwrap_or_default());
    }
    let pairs = options.pairs;
    Ok(Begun {
        placement,
        pairs,
        open,
    })
}

/// Which slices may serve a network of a machine that has `wanted` pairs for its vCPUs. `pairs`: as
/// many as it has where one slice serves it, and then as many as it has.
fn place(slice: &Slice, network: &Network, wanted: u16, pairs: &mut u16) -> QueuePlacement {
    let owner = network.slice() as usize;
    let (locations, path) = (slice.locations(), network.data_path());
    let began_alone = slice.placement().slices() == 1 && slice.joins();
    if began_alone && path == DataPath::Bypass && owner == PRIMARY && *pairs == 1 {
        return QueuePlacement::open(owner, 2);
    }
    let bypass = QueuePlacement::new(locations, owner, path, wanted, 2);
    if bypass.is_shared() {
        *pairs = wanted;
        return bypass;
    }
    if owner != PRIMARY {
        // The queue that asks for more pairs would be served apart from them.
        *pairs = 1;
    }
    QueuePlacement::new(locations, owner, DataPath::Dsm, *pairs, 2)
}

/// The part that `slice` has in a network.
fn make(
    slice: &Arc<Slice>,
    (device, number): (u8, usize),
    begun: Begun,
    window: usize,
) -> Result<Box<dyn VirtioDevice>, DeviceSetupError> {
    let Begun {
        placement,
        pairs,
        open,
    } = begun;
    let among = placement.is_shared();
    // A tap that was made for one pair has one, where its slice serves it alone.
    let possible = if among { pairs..=pairs } else { 1..=pairs };
    let (link, description) = match open {
        Some(Here::Alone(net)) => return Ok(Box::new(net)),
        Some(Here::Among(Opened { link, description })) => (Some(link), description),
        None => (None, described(slice, placement.owner(), number, possible)?),
    };
    if !among {
        return Ok(Box::new(NetworkFront::new(description)));
    }
    let remote = slice.remote_devices().clone();
    let links = remote.links(device, &placement, link, window);
    let links = links.map_err(DeviceSetupError::RemoteDevices)?;
    let user: Option<Use> = slice
        .is_primary()
        .then(|| Box::new(move |usage| remote.use_network(device, usage)) as Use);
    Ok(Box::new(Net::with_links(&description, links, user)))
}

fn described(
    slice: &Slice,
    owner: usize,
    number: usize,
    pairs: RangeInclusive<u16>,
) -> Result<NetDescription, DeviceSetupError> {
    let wrong = |reason| DeviceSetupError::Described {
        slice: owner,
        device: "network",
        number,
        reason,
    };
    let json = slice.next_description(owner).map_err(wrong)?;
    let description: NetDescription =
        serde_json::from_slice(&json).map_err(|error| wrong(error.to_string()))?;
    match description.is_possible(pairs) {
        true => Ok(description),
        false => Err(wrong(format!("{description:?}"))),
    }
}

/// As many as vCPUs, so that each has its own.
fn pairs(list: &DeviceList<'_>) -> u16 {
    list.cpus.min(PAIRS_MAX.into()) as u16
}

fn options(
    (list, switches): (&DeviceList<'_>, &OpenSwitches),
    number: u16,
    network: &Network,
) -> NetOptions {
    let options = match network {
        Network::Tap { name, .. } => NetOptions {
            pairs: pairs(list),
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
        Network::Switch { socket, mac, .. } => {
            let back_end = match socket.clone() {
                SwitchSocket::At(path) => NetBackEnd::Switch { path },
                // Another slice's network has none here.
                SwitchSocket::Named(_) => {
                    NetBackEnd::OpenSwitch(switches.0.get(&number).cloned().unwrap_or_default())
                }
            };
            NetOptions {
                mac: Some(Mac(*mac)),
                ..NetOptions::new(back_end)
            }
        }
    };
    NetOptions { number, ..options }
}
