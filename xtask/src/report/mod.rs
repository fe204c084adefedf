//! How a run is shown: tables, data formats and the HTML page.

mod chart;
mod data;
mod format;
mod html;
mod precisions;
mod requests;
mod roofline;
#[cfg(test)]
pub(crate) mod sample;
mod table;
mod text;

pub(crate) use data::{csv, json};
pub(crate) use format::{digits, error, millis, peers, percent, rate, ratio};
pub(crate) use html::page;
pub(crate) use precisions::precisions;
pub(crate) use requests::{is_request, requests};
pub(crate) use table::{Align, Style, Table};
pub(crate) use text::{document, notes};
