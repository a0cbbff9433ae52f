# How a *_ptx.sh makes a header of the .cu beside it; sourced by it, in its folder. SPDX-License-Identifier: Apache-2.0
#
# The compiler names its own newest PTX version, which older drivers refuse, though the kernels need nothing of it: the
# oldest version and GPU that know all of their instructions are written instead, and ptxas proves that they do.

# ptx_compile SOURCE [OPTION of nvcc]...: the file $ptx, which goes with the shell.
ptx_compile() {
  local source=$1
  shift
  ptx=$(mktemp --suffix=.ptx)
  trap 'rm -f "$ptx" "$ptx.cubin"' EXIT
  nvcc -ptx -O3 "$@" -arch=compute_75 -o "$ptx" "$source"
  sed -i -e 's/^\.version .*/.version 6.3/' -e 's/^\.target .*/.target sm_70/' \
    -e '\:^//:d' -e 's/[ \t]*\/\/.*$//' -e '/^[ \t]*$/d' "$ptx"
  ptxas -arch=sm_75 -o "$ptx.cubin" "$ptx"
  ptxas -arch=sm_90 -o "$ptx.cubin" "$ptx"
}

# ptx_header NAME ARRAY GUARD [LINE]: NAME_ptx.h with the string ARRAY of $ptx; LINE: a second one of its first comment.
ptx_header() {
  {
    echo "/* The PTX of $1.cu, made by $1_ptx.sh. SPDX-License-Identifier: Apache-2.0${4:+$'\n' * $4} */"
    echo "#ifndef $3"
    echo "#define $3"
    echo
    echo '/* clang-format off */'
    echo "static const char $2[] ="
    sed -e 's/\t/ /g' -e 's/["\\]/\\&/g' -e 's/.*/  "&\\n"/' -e '$s/$/;/' "$ptx"
    echo '/* clang-format on */'
    echo
    echo '#endif'
  } >"$1_ptx.h"
}
