//! Commands to home: stretches, and nodes that are given back.

use std::sync::atomic::Ordering;
use std::time::Instant;

use weft_proc::boot::{ControlMessage, EXIT_NODE_LOST, KICK_SIGNAL, MAX_NODES};
use weft_proc::stats::{COMMAND_SHRINK, COMMAND_STRETCH};

use super::{Command, Owner, Pending};
use crate::control;
use crate::report::NodeState;
use crate::rundir::{self, AggregateReply, Client, Entry};

/// Why home gets no command.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    /// It has not carried the last one out.
    #[error("it is busy with an earlier command: try again in a moment")]
    Busy,
    /// It cannot be signalled.
    #[error("the program has just ended")]
    Ended,
}

/// Why a node is not given back.
#[derive(Debug, thiserror::Error)]
enum ShrinkError {
    #[error("node 0 is home: it cannot be given back")]
    Home,
    #[error("it has no node {0}: `weft list` shows its nodes")]
    NoNode(u32),
    #[error("node {number} ({name}) has left already")]
    Left { number: u32, name: String },
    #[error(transparent)]
    Command(#[from] CommandError),
}

impl Owner<'_> {
    /// Home answered a command.
    pub(super) fn answered(&mut self, message: &ControlMessage) {
        let sequence = message.words[0] as u32;
        let Some(at) = self
            .pending
            .iter()
            .position(|pending| pending.sequence == sequence)
        else {
            return;
        };
        let why = match message.words[1] {
            0 => None,
            errno => Some(match control::text(message) {
                text if text.is_empty() => {
                    std::io::Error::from_raw_os_error(errno as i32).to_string()
                }
                text => text,
            }),
        };
        let answer = why
            .clone()
            .map_or(AggregateReply::Done, AggregateReply::Refused);
        match self.pending.remove(at).what {
            Command::Stretch(client) => client.answer(&answer),
            Command::Shrink { node, client } => {
                self.left(node, why);
                if let Some(client) = client {
                    client.answer(&answer);
                }
            }
            // Once stretched, home says itself what was lost, and ends if that
            // was anything.
            Command::GiveWay => {}
            Command::Lost if why.is_none() && !self.is_stretched() => {
                self.tell("the program continues without it: it had not stretched");
            }
            Command::Lost => {}
        }
        self.shrink_next();
    }

    pub(super) fn left(&mut self, number: u32, why: Option<String>) {
        let name = self.aggregate.name(number);
        match why {
            Some(why) => self.tell(&format!("node {name} could not be given back: {why}")),
            None => {
                if let Some(node) = self.aggregate.node(number) {
                    node.state = NodeState::Left;
                    node.stop();
                }
            }
        }
    }

    pub(super) fn serve_clients(&mut self) {
        while let Some((request, client)) = self.entry.as_ref().and_then(Entry::accept) {
            match request {
                rundir::AggregateRequest::View => {
                    client.answer(&AggregateReply::View(Box::new(self.view())))
                }
                rundir::AggregateRequest::Stretch => self.stretch(client),
                rundir::AggregateRequest::Shrink { node } => self.shrink(node, Some(client)),
            }
        }
    }

    fn stretch(&mut self, client: Client) {
        if self.is_stretched() {
            return client.answer(&AggregateReply::Refused("it is stretched already".into()));
        }
        if self.aggregate.nodes.is_empty() {
            return client.answer(&AggregateReply::Refused(
                "it has no other node: start it with --nodes 2 or more".into(),
            ));
        }
        match self.command(COMMAND_STRETCH, 0) {
            Ok(sequence) => self.pending.push(Pending {
                sequence,
                deadline: Instant::now() + self.aggregate.workload.options.lease,
                what: Command::Stretch(client),
            }),
            Err(why) => client.answer(&AggregateReply::Refused(why.to_string())),
        }
    }

    /// Gives a node back that had to wait until home had given way.
    fn shrink_next(&mut self) {
        if self.pending.is_empty() && !self.to_shrink.is_empty() {
            let (number, client) = self.to_shrink.remove(0);
            self.shrink(number, client);
        }
    }

    pub(super) fn shrink(&mut self, number: u32, client: Option<Client>) {
        // That takes a moment, and comes again and again.
        let gives_way = self.position(|what| matches!(what, Command::GiveWay));
        if gives_way.is_some() && self.to_shrink.len() < MAX_NODES {
            return self.to_shrink.push((number, client));
        }
        let stretched = self.is_stretched();
        let outcome = match self.aggregate.node(number) {
            _ if number == 0 => Err(ShrinkError::Home),
            None => Err(ShrinkError::NoNode(number)),
            Some(node) if node.state != NodeState::Running => Err(ShrinkError::Left {
                number,
                name: node.name.clone(),
            }),
            Some(_) if !stretched => {
                self.dismiss(number);
                if let Some(client) = client {
                    client.answer(&AggregateReply::Done);
                }
                return;
            }
            Some(_) => self
                .command(COMMAND_SHRINK, number)
                .map_err(ShrinkError::from),
        };
        match (outcome, client) {
            (Ok(sequence), client) => self.pending.push(Pending {
                sequence,
                deadline: Instant::now() + rundir::SHRINK_BOUND,
                what: Command::Shrink {
                    node: number,
                    client,
                },
            }),
            (Err(why), Some(client)) => client.answer(&AggregateReply::Refused(why.to_string())),
            (Err(why), None) => self.tell(&why.to_string()),
        }
    }

    pub(super) fn is_stretched(&self) -> bool {
        self.home_shared.stats.stretched.load(Ordering::Acquire) != 0
    }

    /// Gives a node back that holds nothing, because the program has not
    /// stretched. Home finds the bit when it does; should it stretch at this
    /// very moment, it finds a closed link to a node without pages, which is the
    /// same to it.
    fn dismiss(&mut self, number: u32) {
        self.home_shared
            .lost_nodes
            .fetch_or(1 << number, Ordering::Release);
        self.left(number, None);
    }

    /// Writes a command and calls home. Returns its number.
    pub(super) fn command(&mut self, command: u32, argument: u32) -> Result<u32, CommandError> {
        if !self.pending.is_empty()
            || !self
                .home_shared
                .command(command, argument, self.sequence + 1)
        {
            return Err(CommandError::Busy);
        }
        self.sequence += 1;
        self.aggregate
            .home
            .signal(KICK_SIGNAL)
            .map(|()| self.sequence)
            .map_err(|_| CommandError::Ended)
    }

    pub(super) fn too_late(&mut self, command: Command) {
        let lease_s = self.aggregate.workload.options.lease.as_secs_f32();
        match command {
            Command::Stretch(client) => client.answer(&AggregateReply::Refused(format!(
                "the program did not stretch within {lease_s} s"
            ))),
            Command::Shrink { node, client } => {
                let why = format!(
                    "its pages were not elsewhere within {} s",
                    rundir::SHRINK_BOUND.as_secs()
                );
                self.left(node, Some(why.clone()));
                if let Some(client) = client {
                    client.answer(&AggregateReply::Refused(why));
                }
            }
            Command::GiveWay => self.shrink_next(),
            Command::Lost => self.give_up(
                &format!(
                    "the program did not answer within {lease_s} s of the loss, and was ended"
                ),
                EXIT_NODE_LOST,
            ),
        }
    }

    pub(super) fn position(&self, wanted: impl Fn(&Command) -> bool) -> Option<usize> {
        self.pending
            .iter()
            .position(|pending| wanted(&pending.what))
    }

    pub(super) fn stretched(&mut self) {
        self.publish();
        while let Some(at) = self.position(|what| matches!(what, Command::Stretch(_))) {
            if let Command::Stretch(client) = self.pending.remove(at).what {
                client.answer(&AggregateReply::Done);
            }
        }
    }
}
