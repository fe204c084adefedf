//! Renders a run as tables, data formats and an HTML page.

mod chart;
mod data;
mod format;
mod html;
mod precisions;
mod readme;
mod requests;
mod roofline;
#[cfg(test)]
pub(crate) mod sample;
mod table;
mod text;
mod training;

pub(crate) use data::{csv, json};
pub use format::{digits, error};
pub(crate) use format::{millis, ratio};
pub(crate) use html::page;
pub use readme::{readme, speed};
pub use table::{Align, Style, Table};
pub(crate) use text::{document, notes};
pub use training::{TrainingStep, training};
