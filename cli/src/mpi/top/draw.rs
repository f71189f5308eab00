//! [`Screen`] on a terminal.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};
use weft_mpi::request::{HostStatus, MachineStatus, Stream, TaskStatus};
use weft_node::said::plain;
use weft_node::size::format_bytes;

use super::screen::{Message, Screen};
use super::shares::{Shares, shares};
use super::text::{cut, last_rows, ranges, width, wrap};
use crate::mpi::status::clock;

/// Columns of a bar.
const BAR: usize = 16;
/// A host whose machines begin to leave within this many seconds is marked.
const SOON: f64 = 30.0;
/// Before each line of the program's standard error.
const ERR: &str = "err│ ";
/// Rows of a message.
const MESSAGE_ROWS: usize = 3;

pub fn draw(frame: &mut Frame<'_>, screen: &Screen) {
    let columns = usize::from(frame.area().width);
    let (message, style) = message(screen, columns);
    let keys = keys(screen, columns);
    let trouble = screen.status.trouble.as_ref();
    let [head, sums, wrong, middle, said, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(u16::from(trouble.is_some())),
        Constraint::Fill(1),
        Constraint::Length(message.len() as u16),
        Constraint::Length(keys.len() as u16),
    ])
    .areas(frame.area());
    frame.render_widget(title(screen, columns), head);
    frame.render_widget(Paragraph::new(sum(screen)), sums);
    if let Some(trouble) = trouble {
        let text = format!("! {}", plain(trouble));
        let bad = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        frame.render_widget(Paragraph::new(cut(&text, columns)).style(bad), wrong);
    }
    parts(frame, screen, middle);
    frame.render_widget(Paragraph::new(lines(message)).style(style), said);
    let reversed = Style::new().add_modifier(Modifier::REVERSED);
    frame.render_widget(Paragraph::new(lines(keys)).style(reversed), foot);
}

fn lines(rows: Vec<String>) -> Vec<Line<'static>> {
    rows.into_iter().map(Line::from).collect()
}

fn parts(frame: &mut Frame<'_>, screen: &Screen, area: Rect) {
    let busy = under_way(screen, area);
    let listed = (screen.status.hosts.len() + screen.status.waiting.len()).max(1) as u16;
    let moves = if busy.is_empty() { 0 } else { busy.len() + 1 } as u16;
    let shares = match screen.is_large {
        true => Shares {
            output: area.height,
            ..Shares::default()
        },
        false => shares(area.height, listed + 1, moves),
    };
    let [hosts_area, moves_area, log_area, output_area] = Layout::vertical([
        Constraint::Length(shares.hosts),
        Constraint::Length(shares.moves),
        Constraint::Length(shares.log),
        Constraint::Length(shares.output),
    ])
    .areas(area);
    hosts(frame, screen, hosts_area);
    section(
        frame,
        &format!("UNDER WAY {}", busy.len()),
        busy,
        moves_area,
    );
    section(frame, "LOG", log(screen, log_area), log_area);
    let (title, rows) = output(screen, output_area);
    section(frame, &title, rows, output_area);
}

/// Rows under a ruled heading.
fn section(frame: &mut Frame<'_>, title: &str, rows: Vec<Line<'static>>, area: Rect) {
    let rule = "─".repeat(usize::from(area.width).saturating_sub(width(title) + 4));
    let dim = Style::new().add_modifier(Modifier::DIM);
    let mut lines = vec![Line::from(format!("── {title} {rule}")).style(dim)];
    lines.extend(rows);
    frame.render_widget(Paragraph::new(lines), area);
}

fn title(screen: &Screen, columns: usize) -> Paragraph<'static> {
    let status = &screen.status;
    let phase = match (&screen.end, screen.silent()) {
        (Some(_), _) => Span::from("ended").red(),
        (None, Some(seconds)) => Span::from(format!("no answer for {seconds} s")).red(),
        (None, None) => Span::from(status.phase.clone()).green(),
    };
    let name = format!("weft mpi top  {}  ", status.name);
    let time = format!("  {}  ", clock(screen.seconds()));
    let used = width(&name) + phase.width() + width(&time);
    let program = plain(status.program.as_deref().unwrap_or("no program"));
    Paragraph::new(Line::from(vec![
        Span::from(name).bold(),
        phase,
        Span::from(time).bold(),
        Span::from(cut(&program, columns.saturating_sub(used))),
    ]))
}

fn sum(screen: &Screen) -> String {
    let status = &screen.status;
    let machines = status.machines.len();
    let ready = status.machines.iter().filter(|machine| machine.ready);
    let ready = match ready.count() {
        // A launcher that was attached has not asked them, and does not have to.
        count if count == machines || status.phase == "running" => String::new(),
        count => format!(", {count} ready"),
    };
    let nowhere = status.machines.iter().filter(|at| at.host.is_none());
    let nowhere = match nowhere.count() {
        0 => String::new(),
        count => format!(", {count} on no host"),
    };
    format!(
        "hosts: {}, {} wanted, {} asked for   machines: {machines}{ready}{nowhere}   moves: {}",
        status.hosts.len(),
        screen.wanted(),
        status.asked,
        status.moves,
    )
}

/// A word for a host, and whether it is bad news.
fn state(screen: &Screen, host: &HostStatus) -> Span<'static> {
    let begins = host.begins.map(|begins| screen.left(begins));
    if !host.answers {
        return Span::from("silent").red();
    }
    match begins {
        _ if host.leaves => Span::from("leaves").yellow(),
        Some(begins) if begins <= 0.0 => Span::from("must leave").red(),
        Some(begins) if begins <= SOON => Span::from("leaves soon").yellow(),
        _ => Span::from("stays").green(),
    }
}

fn hosts(frame: &mut Frame<'_>, screen: &Screen, area: Rect) {
    let columns = usize::from(area.width);
    let status = &screen.status;
    let has_all = columns >= 76;
    let time = |seconds: Option<f64>| seconds.map(|seconds| clock(screen.left(seconds)));
    let row = |host: &HostStatus| {
        let begins = match host.begins {
            Some(begins) if screen.left(begins) <= 0.0 => Some("now".into()),
            begins => time(begins),
        };
        let there: Vec<&MachineStatus> = status
            .machines
            .iter()
            .filter(|machine| machine.is_on(&host.name))
            .collect();
        let names: Vec<&str> = there.iter().map(|machine| &machine.name[..]).collect();
        let machines = format!("{}  {}", there.len(), ranges(&names));
        let left = time(host.left).unwrap_or_else(|| "?".into());
        let mut cells = vec![host.name.clone().into(), state(screen, host)];
        if has_all {
            cells.insert(1, plain(&host.job).into());
        }
        cells.push(format!("{left:>8}").into());
        if has_all {
            cells.push(format!("{:>8}", begins.unwrap_or_else(|| "?".into())).into());
        }
        (cells, machines)
    };
    let mut rows: Vec<(Vec<Span<'static>>, String)> = status.hosts.iter().map(row).collect();
    for waiting in &status.waiting {
        let mut cells = vec![Span::from("-"), Span::from("waits").yellow(), "".into()];
        if has_all {
            cells.insert(1, plain(&waiting.job).into());
            cells.push("".into());
        }
        rows.push((cells, plain(&waiting.why)));
    }
    let mut names = vec!["HOST", "STATE", "    LEFT"];
    let mut most = vec![24, 11, 8];
    if has_all {
        names = vec!["HOST", "JOB", "STATE", "    LEFT", "LEAVE IN"];
        most = vec![columns / 4, 10, 11, 8, 8];
    }
    if rows.is_empty() {
        let blanks = vec![Span::default(); names.len()];
        rows.push((blanks, "no host is there yet".into()));
    }
    let widest = |place: usize| {
        let cells = rows.iter().filter_map(|(cells, _)| cells.get(place));
        let widest = cells.map(Span::width).max().unwrap_or(0);
        widest.max(width(names[place])).min(most[place])
    };
    let mut widths: Vec<usize> = (0..names.len()).map(widest).collect();
    // The mark of the chosen host, and a blank after each column.
    let used = 2 + widths.iter().map(|wide| wide + 1).sum::<usize>();
    widths.push(columns.saturating_sub(used).max(4));
    names.push("MACHINES");
    let rows = rows.into_iter().map(|(cells, rest)| {
        let cells = cells.into_iter().zip(&widths).map(|(cell, wide)| {
            let text = cut(&cell.content, *wide);
            Cell::from(Span::styled(text, cell.style))
        });
        let rest = Cell::from(cut(&rest, widths[widths.len() - 1]));
        Row::new(cells.chain([rest]))
    });
    let constraints = widths.iter().map(|wide| Constraint::Length(*wide as u16));
    let dim = Style::new().add_modifier(Modifier::DIM);
    let table = Table::new(rows, constraints)
        .column_spacing(1)
        .header(Row::new(names).style(dim))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .highlight_symbol("> ");
    let chosen = (!status.hosts.is_empty()).then_some(screen.chosen);
    let mut state = TableState::new().with_selected(chosen);
    frame.render_stateful_widget(table, area, &mut state);
}

/// What agents do with machines, moves first, with bars where there is room.
fn under_way(screen: &Screen, area: Rect) -> Vec<Line<'static>> {
    let machines = screen.status.machines.iter();
    let mut busy: Vec<(&MachineStatus, &TaskStatus)> = machines
        .filter_map(|machine| Some((machine, machine.task.as_ref()?)))
        .collect();
    busy.sort_by_key(|(_, task)| task.expected.is_none());
    let what = |(machine, task): &(&MachineStatus, &TaskStatus)| {
        let from = machine.host.as_ref().map(|from| format!(" from {from}"));
        let to = match (&machine.host, &machine.moves_to) {
            (Some(_), Some(to)) => format!(" to {to}"),
            (None, Some(to)) => format!(" on {to}"),
            (_, None) => String::new(),
        };
        let from = from.unwrap_or_default();
        format!("{} {}{from}{to}", machine.name, task.does)
    };
    let widest = busy.iter().map(|busy| width(&what(busy))).max();
    let wide = widest.unwrap_or(0).min(44);
    let line = |busy: &(&MachineStatus, &TaskStatus)| {
        let what = cut(&what(busy), wide);
        let gap = " ".repeat(wide - width(&what));
        let seconds = screen.since(busy.1.seconds);
        let time = match busy.1.expected {
            Some(expected) => bar(if area.width < 76 { 0 } else { BAR }, seconds, expected),
            None => format!("{seconds:.0} s"),
        };
        Line::from(format!("{what}{gap}  {time}"))
    };
    busy.iter().map(line).collect()
}

/// Of time, as the forecast has it.
fn bar(wide: usize, seconds: f64, expected: f64) -> String {
    let part = (seconds / expected.max(0.1)).clamp(0.0, 1.0);
    let filled = (part * wide as f64) as usize;
    let bar = "█".repeat(filled) + &"·".repeat(wide - filled);
    let gap = if wide > 0 { " " } else { "" };
    match seconds > expected {
        true => format!("{bar}{gap}{seconds:.1} s, not {expected:.1}"),
        false => format!("{bar}{gap}{seconds:.1} of {expected:.1} s"),
    }
}

fn log(screen: &Screen, area: Rect) -> Vec<Line<'static>> {
    let rows = usize::from(area.height.saturating_sub(1));
    let newest = screen.status.log.iter().rev().take(rows).rev();
    let columns = usize::from(area.width);
    // In few rows the begins of more sentences say more than the end of one.
    let wrapped = newest.flat_map(|line| match rows {
        0..=2 => vec![cut(&plain(line), columns)],
        _ => wrap(&plain(line), columns, 2),
    });
    let mut wrapped: Vec<String> = wrapped.collect();
    lines(wrapped.split_off(wrapped.len().saturating_sub(rows)))
}

fn output(screen: &Screen, area: Rect) -> (String, Vec<Line<'static>>) {
    let rows = usize::from(area.height.saturating_sub(1));
    let columns = usize::from(area.width);
    let ends = |stream: &Stream, columns, rows| last_rows(&stream.end, columns, rows);
    let (out, err) = (&screen.output.stdout, &screen.output.stderr);
    let err_columns = columns.saturating_sub(width(ERR));
    let errors = ends(err, err_columns, (rows / 3).max(1).min(rows));
    let written = ends(out, columns, rows - errors.len());
    // What standard output leaves free.
    let errors = match rows - written.len() > errors.len() {
        true => ends(err, err_columns, rows - written.len()),
        false => errors,
    };
    let mut shown = lines(written);
    let error = |line: &String| Line::from(format!("{ERR}{line}")).red();
    shown.extend(errors.iter().map(error));
    let mut title = format!("OUTPUT {}", format_bytes(out.length));
    if err.length > 0 {
        title += &format!(", errors {}", format_bytes(err.length));
    }
    (title, shown)
}

fn message(screen: &Screen, columns: usize) -> (Vec<String>, Style) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let (text, style) = match screen.message() {
        Message::Nothing => (String::new(), Style::new()),
        Message::Question(text) => (text, bold.fg(Color::Yellow)),
        Message::News(text) => (text, Style::new()),
        Message::Trouble(text) => (format!("! {text}"), bold.fg(Color::Red)),
    };
    let mut rows = wrap(&plain(&text), columns, 2);
    // The end of a long answer that is being typed is what counts.
    match screen.message() {
        Message::Question(_) => drop(rows.drain(..rows.len().saturating_sub(MESSAGE_ROWS))),
        _ => rows.truncate(MESSAGE_ROWS),
    }
    (rows, style)
}

fn keys(screen: &Screen, columns: usize) -> Vec<String> {
    if screen.end.is_some() {
        return vec!["any key leaves the page".into()];
    }
    let output = match screen.is_large {
        true => "o hosts",
        false => "o output",
    };
    let all = [
        "+- hosts",
        "n new",
        "s shrink",
        "↑↓ r release",
        "d deploy",
        "x exit",
        output,
        "q quit",
    ];
    let mut rows = vec![String::new()];
    for key in all {
        let row = rows.last().map_or(0, |row| width(row));
        if row > 0 && row + 2 + width(key) > columns {
            rows.push(String::new());
        }
        if let Some(row) = rows.last_mut() {
            if !row.is_empty() {
                row.push_str("  ");
            }
            row.push_str(key);
        }
    }
    rows.truncate(3);
    rows
}

#[cfg(test)]
#[path = "draw_tests.rs"]
mod tests;
