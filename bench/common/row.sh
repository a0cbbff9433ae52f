# shellcheck shell=bash
# Reading rows; sourced by the scripts of bench/. SPDX-License-Identifier: Apache-2.0

# field FILE NAME: the value of NAME in each ROW of FILE as it stands there: a number, a text in quotes, or a list.
field() { sed -n "s/^ROW .*\"$2\": \(\[[^]]*\]\|\"[^\"]*\"\|[^,}]*\).*/\1/p" "$1"; }
