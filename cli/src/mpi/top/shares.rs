//! How many rows each part of the page gets.

/// Of the rows between the head and the foot. A part without rows is not shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    pub hosts: u16,
    pub moves: u16,
    pub log: u16,
    pub output: u16,
}

/// Rows of moves that are shown, with their heading.
const MOVES_MAX: u16 = 6;
/// Rows of sentences that are shown, with their heading.
const LOG_MAX: u16 = 9;

/// `hosts` and `moves`: rows that they would fill, with their headings; no moves have no heading.
pub fn shares(rows: u16, hosts: u16, moves: u16) -> Shares {
    let mut left = rows;
    let mut shares = Shares::default();
    // What each has at least, the most important first.
    give(&mut left, &mut shares.hosts, hosts.min(3));
    give(&mut left, &mut shares.moves, moves.min(2));
    give(&mut left, &mut shares.output, 3);
    give(&mut left, &mut shares.log, 3);
    give(&mut left, &mut shares.hosts, hosts.min((rows / 2).max(3)));
    give(&mut left, &mut shares.moves, moves.min(MOVES_MAX));
    // The rest is for the output, and half as much for the log.
    let log = LOG_MAX.min(3 + left / 3);
    give(&mut left, &mut shares.log, log);
    give(&mut left, &mut shares.output, u16::MAX);
    shares
}

/// As many of the rows that are left as `to` has less than that.
fn give(left: &mut u16, to: &mut u16, up_to: u16) {
    let more = up_to.saturating_sub(*to).min(*left);
    *to += more;
    *left -= more;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_rows_are_given_and_no_more() {
        for rows in 0..100 {
            for hosts in [1, 2, 9, 61] {
                for moves in [0, 2, 61] {
                    let given = shares(rows, hosts, moves);
                    let sum = given.hosts + given.moves + given.log + given.output;
                    assert_eq!(sum, rows, "{rows} {hosts} {moves}");
                    assert!(given.hosts <= hosts && given.moves <= moves);
                }
            }
        }
    }

    #[test]
    fn a_usual_terminal_shows_everything() {
        let given = shares(20, 61, 61);
        assert!(given.hosts == 10 && given.moves >= 4, "{given:?}");
        assert!(given.log >= 3 && given.output >= 3, "{given:?}");
        assert_eq!(shares(2, 5, 0).hosts, 2);
    }
}
