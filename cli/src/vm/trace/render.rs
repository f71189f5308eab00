//! The tables as text.

use super::tables::{Kinds, Tables};
use crate::table::{self, Align};

/// Both tables, with a line above each.
pub fn render(tables: &Tables) -> String {
    let mut text = format!(
        "vm {}: {} faults on {} pages in {:.1} s\n",
        tables.name, tables.faults, tables.pages, tables.seconds
    );
    if tables.missed > 0 {
        text += &format!(
            "{} faults came too fast to be recorded one by one: table 1 and the symbols do not \
            include them\n",
            tables.missed
        );
    }
    if tables.faults == 0 {
        return text;
    }
    text += "\nTable 1: faults by vCPU\n";
    text += &by_vcpu(tables);
    text += "\nTable 2: the pages with most faults\n";
    text += &by_page(tables);
    text
}

fn by_vcpu(tables: &Tables) -> String {
    use Align::{Left, Right};
    let headings = [
        ("node", Right),
        ("vCPU", Left),
        ("faults", Right),
        ("reads", Right),
        ("writes", Right),
        ("upgrades", Right),
        ("kernel", Right),
        ("user", Right),
        ("tables", Right),
        ("code", Right),
        ("waited", Right),
    ];
    let rows: Vec<Vec<String>> = tables
        .by_vcpu
        .iter()
        .map(|row| {
            let mut cells = vec![
                row.node.to_string(),
                row.vcpu.map_or("devices".into(), |vcpu| vcpu.to_string()),
            ];
            cells.extend(numbers(&row.kinds));
            cells.extend([
                (row.kinds.all() - row.user).to_string(),
                row.user.to_string(),
                row.tables.to_string(),
                row.code.to_string(),
                format!("{:.2} s", row.waited_s),
            ]);
            cells
        })
        .collect();
    table::render(&headings, &rows)
}

fn by_page(tables: &Tables) -> String {
    use Align::{Left, Right};
    let headings = [
        ("page", Right),
        ("faults", Right),
        ("reads", Right),
        ("writes", Right),
        ("upgrades", Right),
        ("share", Right),
        ("holds", Left),
        ("used by", Left),
    ];
    let rows: Vec<Vec<String>> = tables
        .by_page
        .iter()
        .map(|row| {
            let mut cells = vec![format!("{:#x}", row.page)];
            cells.extend(numbers(&row.kinds));
            cells.extend([
                format!("{:.1} %", row.share * 100.0),
                row.names.join(", "),
                row.functions.join(", "),
            ]);
            cells
        })
        .collect();
    table::render(&headings, &rows)
}

fn numbers(kinds: &Kinds) -> [String; 4] {
    [kinds.all(), kinds.reads, kinds.writes, kinds.upgrades].map(|number| number.to_string())
}
