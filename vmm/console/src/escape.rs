//! Escape sequences of a guest's console: Ctrl-] and a letter.
//!
//! ```text
//!            Ctrl-]                a letter: an action, or nothing
//!   Typing ──────────▶ Escaped ──────────────────────────────────▶ Typing
//!     ▲ any other byte    │ Ctrl-]: the byte itself
//! ```

/// The byte of Ctrl-].
pub const ESCAPE: u8 = 0x1d;

/// The action of a letter after Ctrl-].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// `q`: stop the machine.
    Quit,
    /// `d`: leave the console; the machine continues.
    Detach,
    /// `?` or `h`: print the letters.
    Help,
}

/// Separates keys for the guest from escape sequences.
#[derive(Debug, Default)]
pub struct Escape {
    escaped: bool,
}

impl Escape {
    /// Takes what was typed. Bytes for the guest are added to `keys`; the
    /// actions among them come back in order.
    pub fn filter(&mut self, typed: &[u8], keys: &mut Vec<u8>) -> Vec<Action> {
        let mut actions = Vec::new();
        for byte in typed {
            match (self.escaped, *byte) {
                (false, ESCAPE) => self.escaped = true,
                (false, byte) => keys.push(byte),
                (true, byte) => {
                    self.escaped = false;
                    match byte.to_ascii_lowercase() {
                        ESCAPE => keys.push(ESCAPE),
                        b'q' => actions.push(Action::Quit),
                        b'd' => actions.push(Action::Detach),
                        b'?' | b'h' => actions.push(Action::Help),
                        _ => {}
                    }
                }
            }
        }
        actions
    }
}

/// The text of the help, for a terminal in raw mode. `detach`: the machine can continue
/// without this terminal.
pub fn help(detach: bool) -> String {
    let mut text = String::from("\r\nweft: Ctrl-] then q: stop the machine");
    if detach {
        text += "; d: leave it running and detach";
    }
    text + "; Ctrl-]: send Ctrl-]; ?: this help\r\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pieces: &[&[u8]]) -> (Vec<u8>, Vec<Action>) {
        let mut escape = Escape::default();
        let mut keys = Vec::new();
        let mut actions = Vec::new();
        for piece in pieces {
            actions.extend(escape.filter(piece, &mut keys));
        }
        (keys, actions)
    }

    #[test]
    fn keys_pass_and_actions_do_not() {
        assert_eq!(run(&[b"ls\r\x03"]), (b"ls\r\x03".to_vec(), vec![]));
        let (keys, actions) = run(&[b"a\x1dqb\x1dD\x1d?c"]);
        assert_eq!(keys, b"abc");
        assert_eq!(actions, [Action::Quit, Action::Detach, Action::Help]);
    }

    #[test]
    fn the_escape_may_be_split_and_doubled() {
        assert_eq!(run(&[b"\x1d", b"q"]).1, [Action::Quit]);
        assert_eq!(run(&[b"\x1d\x1dq"]), (b"\x1dq".to_vec(), vec![]));
        // An unknown letter is swallowed, once.
        assert_eq!(run(&[b"\x1dxx"]), (b"x".to_vec(), vec![]));
    }
}
