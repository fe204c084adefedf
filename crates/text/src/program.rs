//! Inserts checks of values into the instructions of a template.
//!
//! ```text
//! a == b, a in b, a ~ b, a[b]   replaced by filters that charge steps and do the same
//! a + b, a * b, a[b:c]          the operands charge steps; a lazy result is copied into a list
//! {a: b}, m(**a), m(*a)         the keys must be small, and the items charge steps
//! m(a), caller(a), loop(a)      the arguments charge steps and must be shallow: a recursive call passes them on
//! {% set ns.a = b %}            the value must be flat: only a namespace keeps values across iterations
//! {% set a = b %}, {% for %}    the value must be shallow if the template has a recursive loop
//! {% for a in b %}              none is an error, as in jinja2, and the characters of a string charge steps
//! text                          is written as a value, whose bytes charge steps
//! {% break %}, {% continue %}   close the scopes open within the loop, which minijinja does not do
//! ```
//!
//! [`crate::metered`] defines these filters; their names are not valid in a template.

use std::collections::BTreeSet;

use minijinja::machinery::Instruction::{self, *};
use minijinja::machinery::Instructions;
use minijinja::value::{Value, ValueKind};

// Filters for operators, with two values and a result.
pub(crate) const EQ: &str = "==";
pub(crate) const NE: &str = "!=";
pub(crate) const LT: &str = "<";
pub(crate) const LE: &str = "<=";
pub(crate) const GT: &str = ">";
pub(crate) const GE: &str = ">=";
pub(crate) const IN: &str = "<-";
pub(crate) const CONCAT: &str = "~";
pub(crate) const ITEM: &str = "[]";

// Filters that check one value and return it or a replacement.
pub(crate) const SETTLED: &str = "=settled";
pub(crate) const LOOPABLE: &str = "=loopable";
pub(crate) const SHALLOW: &str = "=shallow";
pub(crate) const FLAT: &str = "=flat";
pub(crate) const UNPACKED: &str = "=unpacked";

// Filters that check a tuple of operands and return it.
pub(crate) const COMPARED: &str = "=compared";
pub(crate) const REPEATED: &str = "=repeated";
pub(crate) const SLICED: &str = "=sliced";
pub(crate) const KEYED: &str = "=keyed";
pub(crate) const MERGED: &str = "=merged";
pub(crate) const CALLED: &str = "=called";
pub(crate) const OBJECT_CALLED: &str = "=object_called";

/// Variable in the source with the value 1. minijinja multiplies literals at compile time, even into very long lists.
/// Multiplying by this variable as well prevents that.
pub(crate) const ONE: &str = "unfolded_one";

/// Flag of a recursive loop.
const RECURSIVE: u8 = 2;

/// Cache index of a filter that is not in a program's cache.
const NO_LOCAL: u8 = !0;

/// A construct that is open at an instruction.
enum Open {
    /// A loop, with the first instruction of each iteration and the first one after the loop.
    Loop(u32, u32),
    Scope,
    Capture,
    Escape,
}

/// Returns a program with checks.
pub(crate) fn checked<'a>(program: &Instructions<'a>) -> Instructions<'a> {
    let instructions = (0..).map_while(|at| program.get(at));
    let mut instructions: Vec<_> = instructions.cloned().collect();
    let targets: BTreeSet<u32> = instructions.iter_mut().filter_map(target).map(|at| *at).collect();
    let is_recursive = |it: &Instruction| matches!(it, PushLoop(flags) if flags & RECURSIVE != 0);
    let recursive = instructions.iter().any(is_recursive);
    let mut out = Instructions::new(program.name(), program.source());
    let mut open = Vec::new();
    let mut starts = Vec::with_capacity(instructions.len() + 1);
    let mut len = 0;
    for (at, instruction) in (0..).zip(&instructions) {
        starts.push(len);
        track(&mut open, at, instruction);
        let span = program.get_span(at);
        let mut add = |instruction: Instruction<'a>| {
            len = 1 + match span {
                Some(span) => out.add_with_span(instruction, span),
                None => {
                    out.add_with_line(instruction, program.get_line(at).unwrap_or_default() as u16)
                }
            };
        };
        let literal = match at.checked_sub(1).map(|before| &instructions[before as usize]) {
            Some(LoadConst(value)) if !targets.contains(&at) => Some(value),
            _ => None,
        };
        if let EmitRaw(text) = *instruction {
            add(LoadConst(Value::from_safe_string(text.to_owned())));
            add(Emit);
        } else if let Some(filter) = operator(instruction, literal) {
            add(binary(filter));
        } else {
            before(instruction, recursive).into_iter().for_each(&mut add);
            if let Jump(target) = *instruction {
                left(&open, target).for_each(&mut add);
            }
            add(instruction.clone());
            let counts = matches!(instruction, Add) && literal.is_some_and(Value::is_number);
            if matches!(instruction, Add | Mul | Slice) && !counts {
                add(unary(SETTLED));
            }
        }
    }
    starts.push(len);
    for at in 0..len {
        if let Some(target) = out.get_mut(at).and_then(target) {
            *target = starts[*target as usize];
        }
    }
    out
}

/// Returns the jump target of an instruction.
fn target<'a>(instruction: &'a mut Instruction) -> Option<&'a mut u32> {
    match instruction {
        Jump(at)
        | JumpIfFalse(at)
        | JumpIfFalseOrPop(at)
        | JumpIfTrueOrPop(at)
        | Iterate(at)
        | BuildMacro(_, at, _) => Some(at),
        _ => None,
    }
}

/// Returns the filter of an operator; the second operand may be a literal. A comparison with a literal needs no filter,
/// because it ends with the literal.
fn operator(instruction: &Instruction, literal: Option<&Value>) -> Option<&'static str> {
    match (instruction, literal.map(Value::kind)) {
        (Eq | Ne | Lt | Lte | Gt | Gte, Some(_)) => None,
        (In, Some(ValueKind::Seq)) | (GetItem, Some(ValueKind::String)) => None,
        (Eq, _) => Some(EQ),
        (Ne, _) => Some(NE),
        (Lt, _) => Some(LT),
        (Lte, _) => Some(LE),
        (Gt, _) => Some(GT),
        (Gte, _) => Some(GE),
        (In, _) => Some(IN),
        (StringConcat, _) => Some(CONCAT),
        (GetItem, _) => Some(ITEM),
        _ => None,
    }
}

/// Returns the checks before an instruction.
fn before<'a>(instruction: &Instruction, recursive: bool) -> Vec<Instruction<'a>> {
    match *instruction {
        CompareAndPreserve(_) => joint(COMPARED, Some(2)),
        Mul => joint(REPEATED, Some(2)),
        Slice => joint(SLICED, Some(4)),
        BuildMap(pairs) if pairs > 0 => joint(KEYED, Some(2 * pairs)),
        MergeKwargs(maps) => joint(MERGED, Some(maps)),
        UnpackLists(lists) => joint(MERGED, Some(lists)),
        CallFunction(_, args) => joint(CALLED, args.map(usize::from)),
        CallMethod(_, args) | CallObject(args) => joint(OBJECT_CALLED, args.map(usize::from)),
        UnpackList(_) => vec![unary(UNPACKED)],
        PushLoop(_) => vec![unary(LOOPABLE)],
        FastRecurse => vec![unary(SHALLOW)],
        StoreLocal(_) if recursive => vec![unary(SHALLOW)],
        SetAttr(_) => vec![Swap, unary(FLAT), Swap],
        _ => Vec::new(),
    }
}

fn unary<'a>(filter: &'static str) -> Instruction<'a> {
    ApplyFilter(filter, Some(1), NO_LOCAL)
}

fn binary<'a>(filter: &'static str) -> Instruction<'a> {
    ApplyFilter(filter, Some(2), NO_LOCAL)
}

/// Passes the operands to a filter as a tuple and pushes them back. With `None` their number is on the stack.
fn joint<'a>(filter: &'static str, operands: Option<usize>) -> Vec<Instruction<'a>> {
    let mut checks = vec![BuildTuple(operands), unary(filter), UnpackLists(1)];
    checks.extend(operands.map(|_| DiscardTop));
    checks
}

/// Updates the open constructs after an instruction.
fn track(open: &mut Vec<Open>, at: u32, instruction: &Instruction) {
    match *instruction {
        Iterate(end) => open.push(Open::Loop(at, end)),
        PushWith => open.push(Open::Scope),
        BeginCapture(_) => open.push(Open::Capture),
        PushAutoEscape => open.push(Open::Escape),
        PopLoopFrame | PopFrame | EndCapture | PopAutoEscape => drop(open.pop()),
        _ => {}
    }
}

/// Returns instructions that close everything that a `break` or `continue` would leave open.
fn left<'a>(open: &[Open], target: u32) -> impl Iterator<Item = Instruction<'a>> {
    let leaves =
        |open: &Open| matches!(open, Open::Loop(next, end) if [*next, *end].contains(&target));
    let is_loop = |open: &Open| matches!(open, Open::Loop(..));
    let from = open.iter().rposition(is_loop).filter(|at| leaves(&open[*at]));
    let within = from.map_or(&[][..], |from| &open[from + 1..]);
    within.iter().rev().flat_map(|open| match open {
        Open::Capture => vec![EndCapture, DiscardTop],
        Open::Escape => vec![PopAutoEscape],
        Open::Scope | Open::Loop(..) => vec![PopFrame],
    })
}
