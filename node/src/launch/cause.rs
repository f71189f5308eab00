//! Why a slice ended: what it said, and how its process ended.
//!
//! Both reach the launcher on other ways than home's word that the node is gone,
//! in any order. The first of each counts, and what was said comes before how the
//! process ended: a slice that says what is wrong ends because of it.

/// See the module. Nothing is known at first.
#[derive(Debug, Default)]
pub struct Cause {
    said: Option<String>,
    ended: Option<String>,
    clean: bool,
}

impl Cause {
    /// The slice, or its daemon about it, said what is wrong.
    pub fn said(&mut self, text: String) {
        self.said.get_or_insert(text);
    }

    /// The slice ended, or cannot be reached; `clean` when it ended as it does
    /// after its links.
    pub fn ended(&mut self, why: String, clean: bool) {
        if self.ended.is_none() {
            self.ended = Some(why);
            self.clean = clean;
        }
    }

    /// Whether the slice has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Why the node went, unless it went because home had gone.
    pub fn reason(&self) -> Option<&str> {
        let ended = self.ended.as_deref().filter(|_| !self.clean);
        self.said.as_deref().or(ended)
    }

    /// The same, for a node that nobody has told to go.
    pub fn reason_to_be_gone(&self) -> &str {
        let ended = self.ended.as_deref();
        self.reason().or(ended).unwrap_or("its slice is gone")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_wins() {
        let mut cause = Cause::default();
        assert_eq!(cause.reason(), None);
        cause.ended("its slice was killed".into(), false);
        cause.ended("its daemon closed the connection".into(), false);
        assert_eq!(cause.reason(), Some("its slice was killed"));
        cause.said("it used too much".into());
        cause.said("it used far too much".into());
        assert_eq!(cause.reason(), Some("it used too much"));
    }

    #[test]
    fn a_slice_that_ends_with_its_links_is_no_reason() {
        let mut cause = Cause::default();
        cause.ended("its slice exited with 0".into(), true);
        assert!(cause.has_ended());
        assert_eq!(cause.reason(), None);
        assert_eq!(cause.reason_to_be_gone(), "its slice exited with 0");
    }
}
