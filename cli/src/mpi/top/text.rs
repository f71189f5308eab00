//! Words and the program's output in rows of a bounded width.

use ratatui::text::Span;
use weft_cluster::is_shown;

/// Columns of a tabulator.
const TAB: usize = 8;

/// Columns that a text takes.
pub fn width(text: &str) -> usize {
    Span::raw(text).width()
}

fn width_of(letter: char) -> usize {
    width(letter.encode_utf8(&mut [0; 4]))
}

/// In at most that many columns; `…` for what is left out.
pub fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let mut shown = String::new();
    let mut used = 1;
    for letter in text.chars() {
        used += width_of(letter);
        if used > columns {
            break;
        }
        shown.push(letter);
    }
    match columns {
        0 => String::new(),
        _ => shown + "…",
    }
}

/// In rows that end between words where that is possible. Rows after the first are indented.
pub fn wrap(text: &str, columns: usize, indent: usize) -> Vec<String> {
    let indent = if columns > 4 * indent { indent } else { 0 };
    let mut rows = vec![String::new()];
    let mut is_begun = false;
    for word in text.split(' ') {
        let row = rows.last().map_or(0, |row| width(row));
        let gap = usize::from(is_begun);
        if row + gap + width(word) > columns && is_begun {
            rows.push(" ".repeat(indent));
        } else if let Some(row) = rows.last_mut() {
            row.push_str(&" ".repeat(gap));
        }
        push_hard(&mut rows, word, columns);
        is_begun = true;
    }
    rows
}

/// A word, in several rows if it is longer than one.
fn push_hard(rows: &mut Vec<String>, word: &str, columns: usize) {
    let mut used = rows.last().map_or(0, |row| width(row));
    for letter in word.chars() {
        let more = width_of(letter);
        if used + more > columns.max(1) {
            rows.push(String::new());
            used = 0;
        }
        if let Some(row) = rows.last_mut() {
            row.push(letter);
        }
        used += more;
    }
}

/// The last rows of what a program has written, as a terminal would show it: without what steers
/// a terminal, and of a line that was written over (`\r`) what was written last.
pub fn last_rows(output: &str, columns: usize, rows: usize) -> Vec<String> {
    let lines: Vec<&str> = output.lines().collect();
    let newest = &lines[lines.len().saturating_sub(rows)..];
    let mut shown = Vec::new();
    for line in newest {
        let line = line.trim_end_matches('\r');
        let line = line.rsplit('\r').next().unwrap_or(line);
        let mut of_line = vec![String::new()];
        push_hard(&mut of_line, &spread(line), columns);
        shown.append(&mut of_line);
    }
    shown.split_off(shown.len().saturating_sub(rows))
}

/// Without the sequences that steer a terminal (ECMA-48, CSI), and with blanks for tabulators.
fn spread(line: &str) -> String {
    let mut spread = String::new();
    let mut column = 0;
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\u{1b}' if letters.peek() == Some(&'[') => {
                letters.next();
                while letters
                    .next()
                    .is_some_and(|letter| !('@'..='~').contains(&letter))
                {}
            }
            '\t' => {
                let blanks = TAB - column % TAB;
                spread.push_str(&" ".repeat(blanks));
                column += blanks;
            }
            letter if is_shown(letter) => {
                spread.push(letter);
                column += width_of(letter);
            }
            _ => {}
        }
    }
    spread
}

/// Names such as `vm-0`, in the order of their numbers; neighbours as `vm-0…3`.
pub fn ranges(names: &[&str]) -> String {
    let number = |name: &str| name.strip_prefix("vm-")?.parse::<u32>().ok();
    let mut numbers: Vec<u32> = names.iter().filter_map(|name| number(name)).collect();
    numbers.sort_unstable();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let run = |(first, last): &(u32, u32)| match last - first {
        0 => format!("vm-{first}"),
        1 => format!("vm-{first} vm-{last}"),
        _ => format!("vm-{first}…{last}"),
    };
    let runs: Vec<String> = runs.iter().map(run).collect();
    runs.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_no_wider_than_they_may_be() {
        let text = "one two  three four-hundred-and-forty µ日本語 end";
        for columns in 1..60 {
            for row in wrap(text, columns, 2) {
                assert!(width(&row) <= columns.max(2), "{columns}: {row:?}");
            }
            assert!(width(&cut(text, columns)) <= columns);
        }
        assert_eq!(wrap("one two three", 9, 2), ["one two", "  three"]);
        assert_eq!(cut("abcdef", 4), "abc…");
        assert_eq!(cut("abc", 0), "");
    }

    #[test]
    fn output_is_shown_as_on_a_terminal() {
        let output = "old\n 10 %\r 20 %\r\n\u{1b}[31mred\u{1b}[0m\ta\u{7}b\nx";
        assert_eq!(
            last_rows(output, 40, 3),
            [" 20 %", "red     ab", "x"].map(String::from)
        );
        assert_eq!(last_rows("abcdefgh\n", 3, 2), ["def", "gh"]);
        assert!(last_rows("", 3, 2).is_empty());
        // A text ends in the middle of a sequence.
        assert_eq!(last_rows("a\u{1b}[", 3, 2), ["a"]);
    }

    #[test]
    fn machines_in_a_row_are_a_range() {
        let names = ["vm-10", "vm-0", "vm-1", "vm-2", "vm-4", "vm-5"];
        assert_eq!(ranges(&names), "vm-0…2 vm-4 vm-5 vm-10");
        assert_eq!(ranges(&[]), "");
    }
}
