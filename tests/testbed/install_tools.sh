#!/bin/sh
# Install the system packages that test hosts and vLLM use, where they are missing and this machine lets us.
# The demo needs none of them; without tcmalloc vLLM is slower, without the others the test bed cannot run.
set -eu
PATH="$PATH:/usr/sbin:/sbin" # where Debian keeps sshd, ip and tc, which a plain user's PATH leaves out

missing=""
need() { # need PACKAGE COMMAND...
    package=$1
    shift
    for tool in "$@"; do
        command -v "$tool" >/dev/null || {
            missing="$missing $package"
            return
        }
    done
}
need openssh-server sshd
need openssh-client ssh ssh-keygen
need iproute2 ip tc ss
need nftables nft
need util-linux unshare nsenter taskset
need g++ g++ # of torch.compile and of tiles
need zsh zsh
need fish fish
need tcsh tcsh csh
need ksh ksh
ldconfig -p | grep -q libtcmalloc_minimal || missing="$missing libtcmalloc-minimal4"

[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing system packages (Debian's names):$missing" >&2
    exit 0
fi

echo "installing system packages:$missing"
# Debian starts a server as soon as it is installed, and again at every boot. The tests start their own; both Debian's
# init script and its systemd unit leave the machine's alone while this file exists.
case "$missing" in *openssh-server*)
    mkdir -p /etc/ssh
    [ -e /etc/ssh/sshd_not_to_be_run ] || echo "made by cpupp's tests: delete to run sshd" >/etc/ssh/sshd_not_to_be_run
    ;;
esac
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
# shellcheck disable=SC2086  # a list of words is meant
apt-get -qq install --yes --no-install-recommends $missing </dev/null >/dev/null
