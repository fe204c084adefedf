#!/bin/sh
# Written by `cargo xtask`: lets tracel-llvm-bundler use the LLVM of this machine.
# The bundler would turn a library's path into a wrong name and link every target. Debian lists
# Polly and ships it elsewhere; nothing here uses it.
real=@REAL@
case " $* " in
  *" --system-libs "*)
    "$real" "$@" | sed 's#/[^ ]*/lib\([^/ ]*\)\.\(so\|a\)#-l\1#g' ;;
  *" --libs "*|*" --libnames "*)
    drop=$("$real" --targets-built | tr ' ' '\n' | grep -vxE '@KEEP@' | paste -sd'|' -)
    "$real" "$@" | tr ' ' '\n' \
      | grep -vE "LLVM($drop)(Analysis|AsmParser|CodeGen|Desc|Disassembler|Info|TargetMCA|Utils)" \
      | grep -vE "^(-l|lib)Polly" \
      | paste -sd' ' - ;;
  *) exec "$real" "$@" ;;
esac
