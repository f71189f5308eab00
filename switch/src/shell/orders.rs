//! Orders on standard input: one JSON object in each line.
//!
//! ```text
//! {"peer":{"key":"weft-key-…","address":"10.0.0.2:7000"}}
//! {"peer":{"key":"weft-key-…","address":"10.0.0.3:7000","detour":true}}
//! {"leave":"weft-key-…"}
//! {"counters":true}
//! ```

use std::io;
use std::os::fd::BorrowedFd;

use serde::Deserialize;
use weft_wire::keys::PublicKey;

/// Longest line in bytes.
const LINE_MAX: usize = 4096;
/// Bytes in one read.
const READ: usize = 4096;

/// What the switch is told while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Order {
    /// There is another switch, or it has another address.
    Peer {
        /// Whose switch it is.
        key: PublicKey,
        /// `HOST:PORT`.
        address: String,
        /// It is on the bridge of the tap device, which carries all but what is passed on.
        #[serde(default)]
        detour: bool,
    },
    /// Another switch is no more.
    Leave(PublicKey),
    /// Report.
    Counters(bool),
}

/// Bytes that have arrived.
#[derive(Debug, Default)]
pub struct Orders {
    bytes: Vec<u8>,
    /// The line is too long: it is left out up to its end.
    skips: bool,
}

impl Orders {
    /// Reads once from a descriptor that is readable: the lines that are whole, each an order
    /// or what is wrong with it; `None` at the end.
    pub fn read(
        &mut self,
        input: BorrowedFd<'_>,
    ) -> io::Result<Option<Vec<Result<Order, String>>>> {
        let mut bytes = [0; READ];
        let count = match nix::unistd::read(input, &mut bytes) {
            Ok(0) => return Ok(None),
            Ok(count) => count,
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => 0,
            Err(error) => return Err(error.into()),
        };
        Ok(Some(self.take(&bytes[..count])))
    }

    fn take(&mut self, bytes: &[u8]) -> Vec<Result<Order, String>> {
        let mut orders = Vec::new();
        for byte in bytes {
            if *byte == b'\n' {
                if !self.skips && !self.bytes.trim_ascii().is_empty() {
                    orders.push(parse(&self.bytes));
                }
                self.bytes.clear();
                self.skips = false;
            } else if self.skips {
            } else if self.bytes.len() == LINE_MAX {
                self.bytes.clear();
                self.skips = true;
                orders.push(Err(format!(
                    "an order is longer than {LINE_MAX} bytes: shorten it"
                )));
            } else {
                self.bytes.push(*byte);
            }
        }
        orders
    }
}

fn parse(line: &[u8]) -> Result<Order, String> {
    serde_json::from_slice(line).map_err(|error| {
        format!(
            "{error}: give {{\"peer\":{{\"key\":KEY,\"address\":\"HOST:PORT\"}}}}, \
            {{\"leave\":KEY}} or {{\"counters\":true}}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_orders_or_say_what_is_wrong() {
        let key = weft_wire::keys::generate().unwrap().public();
        let text = format!(
            "{{\"peer\":{{\"key\":\"{key}\",\"address\":\"h:1\"}}}}\n\n\
            {{\"peer\":{{\"key\":\"{key}\",\"address\":\"h:1\",\"detour\":true}}}}\n{{\"leave\":\"{key}\"}}\n\
            {{\"counters\":true}}\n{{\"counter\":true}}\n{}\n{{\"counters\":true}}\n{{\"leave\"",
            "x".repeat(LINE_MAX + 1)
        );
        let mut orders = Orders::default();
        let mut found = Vec::new();
        for piece in text.as_bytes().chunks(7) {
            found.extend(orders.take(piece));
        }
        let peer = |detour| Order::Peer {
            key,
            address: "h:1".into(),
            detour,
        };
        assert_eq!(found[0], Ok(peer(false)));
        assert_eq!(found[1], Ok(peer(true)));
        assert_eq!(found[2], Ok(Order::Leave(key)));
        assert_eq!(found[3], Ok(Order::Counters(true)));
        assert!(found[4].as_ref().unwrap_err().contains("give {\"peer\""));
        assert!(found[5].as_ref().unwrap_err().contains("longer than 4096"));
        assert_eq!(found[6], Ok(Order::Counters(true)));
        assert_eq!(found.len(), 7);
    }
}
