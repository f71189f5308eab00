//! Plain tables: columns as wide as their widest cell, numbers to the right.

/// A cell's place in its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Lays out rows under their headings. Columns are two spaces apart; no line
/// ends in spaces.
pub fn render(headings: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = headings
        .iter()
        .enumerate()
        .map(|(column, (heading, _))| {
            let cells = rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| width(cell));
            cells.chain([width(heading)]).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: Vec<&str>| {
        let mut text = String::new();
        for ((cell, wide), (_, align)) in cells.iter().zip(&widths).zip(headings) {
            let padding = " ".repeat(wide - width(cell).min(*wide));
            if !text.is_empty() {
                text.push_str("  ");
            }
            match align {
                Align::Left => text.extend([cell, padding.as_str()]),
                Align::Right => text.extend([padding.as_str(), cell]),
            }
        }
        text.truncate(text.trim_end().len());
        text + "\n"
    };
    let mut text = line(headings.iter().map(|(heading, _)| *heading).collect());
    for row in rows {
        text += &line(row.iter().map(String::as_str).collect());
    }
    text
}

fn width(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [
            vec!["a".into(), "1".into()],
            vec!["µµ".into(), "123".into()],
        ];
        let text = render(&[("name", Align::Left), ("n", Align::Right)], &rows);
        assert_eq!(text, "name    n\na       1\nµµ    123\n");
    }
}
