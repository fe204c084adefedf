//! A table, rendered as Markdown for files and pipes or drawn for a terminal.

use std::io::IsTerminal;

use comfy_table::{CellAlignment, ContentArrangement, presets};

/// Alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Output style of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Markdown,
    Terminal,
}

impl Style {
    /// Drawn if standard output is a terminal, otherwise Markdown.
    pub fn of_stdout() -> Self {
        if std::io::stdout().is_terminal() { Self::Terminal } else { Self::Markdown }
    }

    /// Escapes text that Markdown would parse as a tag.
    pub fn escape(self, text: &str) -> String {
        match self {
            Self::Markdown => text.replace('&', "&amp;").replace('<', "&lt;"),
            Self::Terminal => text.to_owned(),
        }
    }
}

/// Rows of text with named columns.
#[derive(Debug, Clone)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<S: Into<String>>(columns: impl IntoIterator<Item = (S, Align)>) -> Self {
        let columns = columns.into_iter().map(|(name, align)| (name.into(), align)).collect();
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row with one cell per column.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<_> = cells.into_iter().collect();
        debug_assert_eq!(cells.len(), self.columns.len(), "a row has one cell per column");
        self.rows.push(cells);
    }

    pub(crate) fn columns(&self) -> &[(String, Align)] {
        &self.columns
    }

    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Removes the columns that are empty in every row.
    pub(crate) fn without_empty_columns(mut self) -> Self {
        let keep: Vec<bool> = (0..self.columns.len())
            .map(|i| self.rows.is_empty() || self.rows.iter().any(|row| !row[i].is_empty()))
            .collect();
        let mut kept = keep.iter().copied();
        self.columns.retain(|_| kept.next().unwrap_or(true));
        for row in &mut self.rows {
            let mut kept = keep.iter().copied();
            row.retain(|_| kept.next().unwrap_or(true));
        }
        self
    }

    pub fn render(&self, style: Style) -> String {
        match style {
            Style::Markdown => self.markdown(),
            Style::Terminal => self.drawn(),
        }
    }

    fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let escape = |text: &String| {
            let cell = text.replace('\\', "\\\\").replace('|', "\\|").replace('\n', " ");
            Style::Markdown.escape(&cell)
        };
        let names: Vec<_> = self.columns.iter().map(|(name, _)| escape(name)).collect();
        let rules = self.columns.iter().map(|(_, align)| match align {
            Align::Left => "---".to_owned(),
            Align::Right => "---:".to_owned(),
        });
        let mut out = line(&names) + &line(&rules.collect::<Vec<_>>());
        for row in &self.rows {
            out += &line(&row.iter().map(escape).collect::<Vec<_>>());
        }
        out
    }

    fn drawn(&self) -> String {
        let mut table = comfy_table::Table::new();
        table
            .load_preset(presets::UTF8_FULL_CONDENSED)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_header(self.columns.iter().map(|(name, _)| name));
        for row in &self.rows {
            table.add_row(row);
        }
        for (column, (_, align)) in table.column_iter_mut().zip(&self.columns) {
            column.set_cell_alignment(match align {
                Align::Left => CellAlignment::Left,
                Align::Right => CellAlignment::Right,
            });
        }
        format!("{table}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table =
            Table::new([("case", Align::Left), ("none", Align::Left), ("ms", Align::Right)]);
        table.row(["a|b\\".into(), String::new(), "1.5".into()]);
        table.row(["c".into(), String::new(), "10".into()]);
        table
    }

    #[test]
    fn markdown_escapes_what_would_end_a_cell() {
        insta::assert_snapshot!(table().without_empty_columns().render(Style::Markdown), @r"
        | case | ms |
        | --- | ---: |
        | a\|b\\ | 1.5 |
        | c | 10 |
        ");
    }

    #[test]
    fn a_terminal_gets_lines() {
        insta::assert_snapshot!(table().render(Style::Terminal));
    }
}
