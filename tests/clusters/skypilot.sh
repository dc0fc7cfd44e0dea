#!/bin/bash
# skypilot.sh hold W [KEPT ...]: a home and a /tmp of their own, with the KEPT folders in them, for what `inside` runs
# skypilot.sh inside W COMMAND ...: the command in there (root; `hold` is the first process of a PID namespace)
set -euo pipefail
do=$1 W=$2; shift 2
. "$W/names"    # SKY, UV, NODE_PATH, SLURM_CONF, PORT

hold() {
  mkdir -p "$W"/{home/.ssh,home/.slurm,home/.sky,tmp,shim,keys} /run/sshd
  chmod 700 "$W/home/.ssh"
  chmod 1777 "$W/tmp"
  # nodes install uv with a script from the network: here it is the one of this machine
  cat > "$W/shim/curl" << END
#!/bin/bash
case "\$*" in *uv/install.sh*) echo 'mkdir -p "\$UV_INSTALL_DIR" && cp $UV "\$UV_INSTALL_DIR/uv"' ;;
*) exec /usr/bin/curl "\$@" ;; esac
END
  chmod +x "$W/shim/curl"
  printf 'jobs:\n  controller:\n    consolidation_mode: true\n' > "$W/home/.sky/config.yaml"
  for key in host user; do ssh-keygen -q -t ed25519 -N "" -f "$W/keys/$key"; done
  install -m 600 "$W/keys/user.pub" "$W/home/.ssh/authorized_keys"
  cat > "$W/home/.slurm/config" << END
Host here
  HostName 127.0.0.1
  Port $PORT
  User root
  IdentityFile $W/keys/user
  IdentitiesOnly yes
END
  cat > "$W/sshd_config" << END
Port $PORT
ListenAddress 127.0.0.1
HostKey $W/keys/host
PidFile $W/sshd.pid
PasswordAuthentication no
UsePAM no
StrictModes no
MaxSessions 100
MaxStartups 100
Subsystem sftp internal-sftp
SetEnv SLURM_CONF=$SLURM_CONF PATH=$NODE_PATH ${SSL_CERT_FILE:+SSL_CERT_FILE=$SSL_CERT_FILE}
END
  { cat /etc/profile; echo "export PATH=$NODE_PATH SLURM_CONF=$SLURM_CONF"; } > "$W/profile"    # login shells reset it
  for kept in "$@"; do
    case $kept in
    /root/*) own=$W/home${kept#/root} ;;
    /tmp/*) own=$W$kept ;;
    *) continue ;;
    esac
    mkdir -p "$own"
    mount --rbind "$kept" "$own"
  done
  mount --bind "$W/profile" /etc/profile
  mount --rbind "$W/home" /root
  mount --rbind "$W/tmp" /tmp
  own /usr/sbin/sshd -f "$W/sshd_config" -E "$W/sshd.log"
  touch "$W/ready"
  sleep infinity &
  wait    # and reap, as the first process of a namespace has to
}

own() {
  env -i HOME=/root SLURM_CONF="$SLURM_CONF" SKYPILOT_DISABLE_USAGE_COLLECTION=1 PATH="$SKY/bin:$NODE_PATH" \
    ${SSL_CERT_FILE:+SSL_CERT_FILE="$SSL_CERT_FILE"} "$@"
}

case $do in
hold) hold "$@" ;;
inside)
  enter=(nsenter --mount --pid --target "$(cat "$W/pid")")
  own "${enter[@]}" bash -c 'cd "$0" && exec "$@"' "$PWD" "$@" ;;
esac
