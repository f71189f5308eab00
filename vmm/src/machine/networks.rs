//! The networks of a configuration, as one slice sees them: links that lie here are
//! opened and described to the others, those of others are heard of.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::MachineError;
use super::configuration::{Configuration, DataPath, Network};
use crate::slice::delegation::Scheme;
use crate::slice::{BOOTSTRAP, Slice};
use crate::virtio::VirtioDevice;
use crate::virtio::net::{
    self, FarNet, Net, NetBackEnd, NetDescription, NetOptions, Opened, PAIRS_MAX, Use,
};

/// A device with who serves it.
pub(super) type Placed = (Scheme, Box<dyn VirtioDevice>);

/// Opens the networks of a machine on one node.
pub(super) fn open(configuration: &Configuration) -> Result<Vec<Net>, MachineError> {
    let networks = (0..).zip(&configuration.networks);
    let open = |(number, network)| Ok(Net::open(&options(configuration, number, network))?);
    networks.map(open).collect()
}

/// A network as far as it is known before the other slices were heard.
struct Begun {
    scheme: Scheme,
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

/// Opens what lies on `slice`, and makes the ways to what does not. As for disks,
/// each slice tells first and listens then.
pub(crate) fn open_for(
    configuration: &Configuration,
    slice: &Arc<Slice>,
) -> Result<Vec<Placed>, MachineError> {
    let networks = (0..).zip(&configuration.networks);
    let begun = networks
        .map(|(number, network)| begin(configuration, slice, number, network))
        .collect::<Result<Vec<_>, _>>()?;
    let ways = begun.iter().map(|begun| usize::from(begun.pairs)).sum();
    let first = configuration.disks.len();
    let mut all = Vec::new();
    for (number, begun) in begun.into_iter().enumerate() {
        let device = (first + number) as u8;
        let delegation = slice.delegation();
        delegation.add_scheme(device, &begun.scheme);
        let scheme = begun.scheme.clone();
        let made = make(slice, (device, number), begun, net::window(ways))?;
        delegation.add_configuration(device, made.configuration());
        all.push((scheme, made));
    }
    Ok(all)
}

/// Opens a network that lies here and tells the others of it.
fn begin(
    configuration: &Configuration,
    slice: &Arc<Slice>,
    number: u16,
    network: &Network,
) -> Result<Begun, MachineError> {
    let mut options = options(configuration, number, network);
    let owner = network.slice() as usize;
    let pairs = pairs(configuration);
    let bypass = Scheme::new(slice.locations(), owner, network.data_path(), pairs, 2);
    let among = (0..pairs).any(|pair| bypass.server(pair) != owner);
    let scheme = if among {
        options.pairs = pairs;
        bypass
    } else {
        if owner != BOOTSTRAP {
            // The queue that asks for more pairs would be served apart from them.
            options.pairs = 1;
        }
        Scheme::new(slice.locations(), owner, DataPath::Dsm, options.pairs, 2)
    };
    let open = match owner == slice.number() {
        false => None,
        true if among => Some(Here::Among(Net::open_for_switch(&options)?)),
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
        scheme,
        pairs,
        open,
    })
}

/// The part that `slice` has in a network.
fn make(
    slice: &Arc<Slice>,
    (device, number): (u8, usize),
    begun: Begun,
    window: usize,
) -> Result<Box<dyn VirtioDevice>, MachineError> {
    let Begun {
        scheme,
        pairs,
        open,
    } = begun;
    let among = (0..scheme.units()).any(|pair| scheme.server(pair) != scheme.owner());
    // A tap that was made for one pair has one, where its slice serves it alone.
    let possible = if among { pairs..=pairs } else { 1..=pairs };
    let (link, description) = match open {
        Some(Here::Alone(net)) => return Ok(Box::new(net)),
        Some(Here::Among(Opened { link, description })) => (Some(link), description),
        None => (None, described(slice, scheme.owner(), number, possible)?),
    };
    if !among {
        return Ok(Box::new(FarNet::new(description)));
    }
    let delegation = slice.delegation().clone();
    let links = delegation.links(device, &scheme, link, window);
    let links = links.map_err(MachineError::Delegation)?;
    let user: Option<Use> = slice
        .is_bootstrap()
        .then(|| Box::new(move |usage| delegation.use_network(device, usage)) as Use);
    Ok(Box::new(Net::spread(&description, links, user)))
}

fn described(
    slice: &Slice,
    owner: usize,
    number: usize,
    pairs: RangeInclusive<u16>,
) -> Result<NetDescription, MachineError> {
    let wrong = |reason| MachineError::Described {
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
fn pairs(configuration: &Configuration) -> u16 {
    configuration.cpus.min(PAIRS_MAX.into()) as u16
}

fn options(configuration: &Configuration, number: u16, network: &Network) -> NetOptions {
    let options = match network {
        Network::Tap { name, .. } => NetOptions {
            pairs: pairs(configuration),
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
