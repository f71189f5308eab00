//! The nodes of a machine that lie on other hosts: the connections to the daemons
//! that run them, for as long as the machine lives.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_machine::Configuration;
use weft_node::machine::{self, MachinePlan};
use weft_node::remote::{Event, RemoteSlice};
use weft_platform::clock::Reference;

use super::companions::{Sockets, sockets};
use super::error::VmError;
use super::plan::Plan;

/// How often daemons are told that this process lives, at least; several times in
/// a lease.
const BEAT: Duration = Duration::from_secs(1);
const BEATS: u32 = 4;

/// What the process of a slice on another host is told.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceSettings {
    /// The machine.
    pub configuration: Configuration,
    /// The clock that it follows.
    pub reference: Reference,
    /// For tests: frames wait for a random time below this before they are sent.
    pub link_delay_max: Duration,
}

/// Nodes on other hosts, by number.
pub struct Hosts {
    machine: String,
    lease: Duration,
    nodes: BTreeMap<usize, RemoteSlice>,
    beaten: Instant,
}

impl Hosts {
    /// Asks all hosts, links all nodes and starts the slices; the last are node 0's
    /// ends of the links.
    pub fn start(plan: &Plan, reference: &Reference) -> Result<(Hosts, Sockets), VmError> {
        let nodes = &plan.nodes;
        let settings = SliceSettings {
            configuration: plan.configuration.clone(),
            reference: reference.clone(),
            link_delay_max: nodes.link_delay_max,
        };
        let settings = serde_json::to_string(&settings).map_err(|error| {
            VmError::system("describe the machine")(std::io::Error::from(error))
        })?;
        let cpus: Vec<u32> = nodes.shares.iter().map(|share| share.cpus).collect();
        let placement = plan.configuration.placement();
        let budget = |slice| placement.budget_bytes(slice, plan.configuration.spare_bytes);
        let memory_bytes: Vec<u64> = (0..nodes.count).map(budget).collect();
        let asked = MachinePlan {
            hosts: &nodes.hosts,
            name: &plan.name,
            memory_bytes: &memory_bytes,
            lease: nodes.lease,
            features: (plan.configuration.cpu_model.unwrap_or_default()).host_features(),
            cpus: &cpus,
            settings: &settings,
        };
        let (slices, links) = machine::start(&asked, None)?;
        let links = sockets(links).map_err(VmError::system("take over links"))?;
        let hosts = Hosts {
            machine: plan.name.clone(),
            lease: nodes.lease,
            nodes: (1..).zip(slices).collect(),
            beaten: Instant::now(),
        };
        for node in hosts.nodes.keys() {
            let described = nodes.describe(*node).unwrap_or_default();
            let host = hosts.nodes.get(node).map_or("", RemoteSlice::host);
            eprintln!("weft: vm {}: {described} is on {host}", plan.name);
        }
        Ok((hosts, links))
    }

    /// How often [`Hosts::tend`] has to be called.
    pub fn beat(&self) -> Duration {
        BEAT.min(self.lease / BEATS)
    }

    /// Readable when a daemon has something to say.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.nodes.values().map(|slice| slice.descriptor())
    }

    /// Hears what daemons say, and tells them that this process lives; whether one
    /// of them wants its memory back.
    pub fn tend(&mut self) -> bool {
        let mut leaving = false;
        let beats = self.beaten.elapsed() >= self.beat();
        if beats {
            self.beaten = Instant::now();
        }
        let mut lost = Vec::new();
        let mut said = Vec::new();
        for (node, slice) in &mut self.nodes {
            let events = slice.receive().and_then(|events| {
                if beats {
                    slice.heartbeat(self.lease)?;
                }
                Ok(events)
            });
            match events {
                Ok(events) => {
                    for event in events {
                        match event {
                            Event::Said(text) => said.push((*node, text)),
                            Event::Ended { clean: true, .. } => {}
                            Event::Ended { why, .. } => said.push((*node, why)),
                            Event::Leaving => {
                                leaving = true;
                                let text = "its daemon is stopping and needs its memory back";
                                said.push((*node, text.to_owned()));
                            }
                        }
                    }
                }
                Err(why) => lost.push((*node, why)),
            }
        }
        for (node, text) in said {
            self.say(node, &text);
        }
        for (node, why) in lost {
            self.say(node, &format!("its daemon is lost: {why}"));
            // The daemon, if it lives, ends its slice, and with it the machine.
            if let Some(mut slice) = self.nodes.remove(&node) {
                slice.disconnect();
            }
        }
        leaving
    }

    /// Ends all slices and gives the hosts back what they lent, within bounds.
    pub fn finish(mut self) {
        for slice in self.nodes.values_mut() {
            slice.release();
        }
    }

    fn say(&self, node: usize, text: &str) {
        let host = self.nodes.get(&node).map_or("", RemoteSlice::host);
        // The terminal may be in raw mode.
        eprint!(
            "weft: vm {}: node {node} ({host}): {text}\r\n",
            self.machine
        );
    }
}
