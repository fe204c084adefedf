#!/bin/sh
# Written by `cargo xtask`: lets tracel-llvm-bundler use the LLVM of this machine.
# Library paths become -l names, because the bundler derives wrong names from paths. Unused targets
# are dropped, because it would link all of them. Polly is dropped, because nothing uses it and
# Debian ships it in another package.
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
