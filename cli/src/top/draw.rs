//! [`Screen`] on a terminal.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};
use weft_cluster::{HostState, HostView, LogKind, LogRecord, Overview};
use weft_node::said::plain;
use weft_node::size::format_bytes;

use super::screen::{Screen, Tab};

/// Columns of a bar.
const BAR: usize = 20;
/// Rows of the log, if there is room.
const LOG_ROWS: u16 = 8;

pub fn draw(frame: &mut Frame<'_>, screen: &Screen) {
    let [head, sums, list, log, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Min(3),
        Constraint::Length(LOG_ROWS + 1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(title(&screen.overview), head);
    let sum = Paragraph::new(sum(&screen.overview)).wrap(Wrap { trim: true });
    frame.render_widget(sum, sums);
    match screen.tab {
        Tab::Hosts => hosts(frame, screen, list),
        Tab::Work => work(frame, screen, list),
    }
    events(frame, screen, log);
    let (text, is_bad) = screen.footer();
    let style = match is_bad {
        true => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        false => Style::new().add_modifier(Modifier::REVERSED),
    };
    frame.render_widget(Paragraph::new(plain(&text)).style(style), foot);
}

fn title(overview: &Overview) -> Paragraph<'static> {
    let leader = match &overview.leader {
        Some(leader) => format!("{leader} decides, by {}", overview.policy).into(),
        None => Span::from("no host decides: run `weft node start` on a member").red(),
    };
    let mut spans = vec![
        Span::from(format!("weft top  {}  ", overview.cluster)).bold(),
        leader,
    ];
    if overview.hands_off {
        spans.push(Span::from("  hands off").yellow());
    }
    Paragraph::new(Line::from(spans))
}

fn sum(overview: &Overview) -> String {
    let living: Vec<&HostView> = overview.hosts.iter().filter(|host| host.alive).collect();
    let cores = |of: fn(&HostView) -> u32| living.iter().map(|host| of(host)).sum::<u32>();
    let mib = |of: fn(&HostView) -> u64| living.iter().map(|host| of(host)).sum::<u64>();
    let spread = overview.runs.iter().filter(|run| run.parts.len() > 1);
    format!(
        "{} of {} hosts   cores: {} of {} free, largest block {}, {} stranded   memory: {} of {} \
         free   {} run, {} of them spread, {} wait",
        living.len(),
        overview.hosts.len(),
        cores(|host| host.cores_free),
        cores(|host| host.cores),
        overview.largest_block(),
        cores(|host| host.cores_stranded),
        format_bytes(mib(|host| host.memory_free_mib) << 20),
        format_bytes(mib(|host| host.memory_mib) << 20),
        overview.runs.len(),
        spread.count(),
        overview.waits.len()
    )
}

/// Used room filled, free room empty.
fn bar(free: u64, whole: u64) -> String {
    let used = whole.saturating_sub(free);
    let filled = (used * BAR as u64).checked_div(whole).unwrap_or(0) as usize;
    format!("{}{}", "█".repeat(filled), "·".repeat(BAR - filled))
}

fn head(names: &[&'static str]) -> Row<'static> {
    Row::new(names.to_vec()).style(Style::new().add_modifier(Modifier::DIM))
}

fn list(frame: &mut Frame<'_>, table: Table<'_>, chosen: usize, area: Rect) {
    let table = table.row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(Some(chosen));
    frame.render_stateful_widget(table, area, &mut state);
}

fn hosts(frame: &mut Frame<'_>, screen: &Screen, area: Rect) {
    let row = |host: &&HostView| {
        let state = match host.state {
            HostState::Lends => Span::from(host.state.name()).green(),
            HostState::Cordoned | HostState::Drained => Span::from(host.state.name()).yellow(),
            HostState::Failing | HostState::NoDaemon | HostState::Left => {
                Span::from(host.state.name()).red()
            }
        };
        let report = host.report.as_ref();
        let names = screen.overview.runs.iter();
        let here = names.filter(|run| run.parts.iter().any(|part| part.host == host.name));
        let here: Vec<&str> = here.map(|run| &run.name[..]).collect();
        let cores = (u64::from(host.cores_free), u64::from(host.cores));
        Row::new([
            Cell::from(host.name.clone()),
            Cell::from(state),
            Cell::from(format!(
                "{:>3}/{:<3} {}",
                cores.0,
                cores.1,
                bar(cores.0, cores.1)
            )),
            Cell::from(format!(
                "{:>9} {}",
                format_bytes(host.memory_free_mib << 20),
                bar(host.memory_free_mib, host.memory_mib)
            )),
            Cell::from(report.map_or("-".into(), |report| format!("{:.1}", report.load))),
            Cell::from(here.join(" ")),
        ])
    };
    let rows: Vec<Row<'_>> = screen.hosts().iter().map(row).collect();
    let widths = [
        Constraint::Length(16),
        Constraint::Length(9),
        Constraint::Length(28),
        Constraint::Length(30),
        Constraint::Length(6),
        Constraint::Min(10),
    ];
    let names = ["HOST", "STATE", "FREE CORES", "FREE MEMORY", "LOAD", "HAS"];
    let table = Table::new(rows, widths).header(head(&names));
    list(frame, table, screen.chosen, area);
}

fn work(frame: &mut Frame<'_>, screen: &Screen, area: Rect) {
    let runs = screen.runs();
    let mut rows: Vec<Row<'_>> = Vec::new();
    for run in runs {
        let part = |part: &weft_cluster::WorkPart| {
            let memory = format_bytes(part.memory_mib << 20);
            format!("{} {}/{memory}", part.host, part.cores)
        };
        let parts: Vec<String> = run.parts.iter().map(part).collect();
        let state = match run.state() {
            "runs" => Span::from("runs").green(),
            other => Span::from(other).yellow(),
        };
        rows.push(Row::new([
            Cell::from(run.name.clone()),
            Cell::from(run.kind.name()),
            Cell::from(plain(&run.user)),
            Cell::from(state),
            Cell::from(format!("{:.2}", run.slow_down)),
            Cell::from(parts.join(", ")),
        ]));
    }
    for wait in screen.waits() {
        rows.push(Row::new([
            Cell::from(wait.name.clone()),
            Cell::from(wait.kind.name()),
            Cell::from(plain(&wait.user)),
            Cell::from(Span::from("waits").red()),
            Cell::from("-"),
            Cell::from(plain(&wait.why)),
        ]));
    }
    let widths = [
        Constraint::Length(24),
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(12),
        Constraint::Length(6),
        Constraint::Min(20),
    ];
    let names = [
        "NAME",
        "KIND",
        "USER",
        "STATE",
        "SLOWER",
        "HOSTS, OR WHY IT WAITS",
    ];
    let table = Table::new(rows, widths).header(head(&names));
    list(frame, table, screen.chosen, area);
}

fn events(frame: &mut Frame<'_>, screen: &Screen, area: Rect) {
    let next = screen.overview.next_moves.first();
    let title = match next {
        Some(next) => format!("NEXT  {}", plain(&next.why)),
        None => "LOG".to_owned(),
    };
    let mut lines = vec![Line::from(title).style(Style::new().add_modifier(Modifier::DIM))];
    let line = |record: &LogRecord| {
        let text = crate::cluster::log::line(record);
        match record.kind {
            LogKind::Fail | LogKind::Refuse => Line::from(text).red(),
            _ => Line::from(text),
        }
    };
    let rows = usize::from(area.height.saturating_sub(1));
    let newest = screen.log.iter().rev().take(rows);
    lines.extend(newest.map(line));
    frame.render_widget(Paragraph::new(lines), area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::screen::tests::overview;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn text(screen: &Screen, columns: u16, rows: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        terminal.draw(|frame| draw(frame, screen)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn hosts_have_bars_and_the_work_that_is_on_them() {
        let screen = Screen::new(overview(&["alpha", "beta"]), Vec::new());
        let shown = text(&screen, 120, 24);
        assert!(
            shown.contains("2 of 2 hosts   cores: 6 of 16 free"),
            "{shown}"
        );
        let alpha = shown.lines().find(|line| line.contains("alpha  ")).unwrap();
        assert!(alpha.contains("3/8   ████████████········"), "{alpha}");
        assert!(alpha.contains("web"), "{alpha}");
    }

    /// No size of a terminal is a panic.
    #[test]
    fn it_draws_on_any_terminal() {
        let mut screen = Screen::new(overview(&["alpha"]), Vec::new());
        screen.overview.leader = None;
        for (columns, rows) in [(1, 1), (20, 5), (80, 24), (300, 100)] {
            for tab in [Tab::Hosts, Tab::Work] {
                screen.tab = tab;
                text(&screen, columns, rows);
            }
        }
        assert!(text(&screen, 80, 24).contains("web"));
    }
}
