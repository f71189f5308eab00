//! The connection to the launcher: dialled until there is one, and again when it is lost.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use weft_wire::channel::{Channel, Reader};
use weft_wire::handshake;
use weft_wire::hello::{self, Hello};
use weft_wire::socket;

use super::services::Services;
use super::{Event, say};
use crate::control::{Greeting, SILENCE_MAX, STEP_MAX, ToAgent};
use crate::token::Token;

const AGAIN: Duration = Duration::from_secs(1);

/// Dials in a thread of its own, for as long as the agent lives.
pub fn start(token: Token, services: Arc<Services>, events: Sender<Event>) -> anyhow::Result<()> {
    let mut dialler = Dialler {
        token,
        services,
        events,
        links: 0,
        said: String::new(),
    };
    let thread = thread::Builder::new().name("link".into());
    thread
        .spawn(move || while dialler.turn() {})
        .context("cannot start a thread")?;
    Ok(())
}

struct Dialler {
    token: Token,
    services: Arc<Services>,
    events: Sender<Event>,
    links: u64,
    /// Why there is no launcher, as it was said last.
    said: String,
}

impl Dialler {
    /// False when the agent has ended.
    fn turn(&mut self) -> bool {
        let mut why = String::from("its token has no address");
        for address in self.token.addresses.clone() {
            match self.greet(&address) {
                Ok(channel) => {
                    self.said.clear();
                    return self.listen(channel);
                }
                Err(error) => why = format!("{address}: {error:#}"),
            }
        }
        if self.said != why {
            say(&format!("no launcher answers ({why}); it is asked again"));
            self.said = why;
        }
        thread::sleep(AGAIN);
        true
    }

    fn greet(&self, address: &str) -> anyhow::Result<Channel> {
        let stream = socket::dial(address, STEP_MAX)?;
        let own = stream.local_addr()?.ip();
        let launcher = stream.peer_addr()?.ip();
        let keys = self.services.keys();
        let mut channel = handshake::dial_control(stream.into(), keys, &self.token.key, STEP_MAX)?;
        let ours = Hello::here();
        let theirs = hello::exchange(&mut channel, &ours, STEP_MAX)?;
        // A launcher of another build gives the host back.
        let same = hello::check_build(&theirs, &ours).map_err(|mismatch| mismatch.to_string());
        let offer = same.and_then(|()| {
            let offer = self.services.offer(own, launcher);
            offer.map_err(|error| format!("{error:#}"))
        });
        channel.send(&Greeting {
            secret: self.token.secret.clone(),
            offer,
        })?;
        Ok(channel)
    }

    fn listen(&mut self, channel: Channel) -> bool {
        self.links += 1;
        let link = self.links;
        let (mut reader, writer) = channel.split();
        let mut event = Event::Up {
            link,
            writer: Box::new(writer),
        };
        loop {
            if self.events.send(event).is_err() {
                return false;
            }
            event = match receive(&mut reader) {
                Ok(message) => Event::Heard { link, message },
                Err(error) => {
                    let why = error.to_string();
                    return self.events.send(Event::Down { link, why }).is_ok();
                }
            };
        }
    }
}

fn receive(reader: &mut Reader) -> anyhow::Result<ToAgent> {
    Ok(reader.receive(SILENCE_MAX)?)
}
