#!/bin/bash
# sky_on_slurm.sh up FOLDER SKY_VENV | run FOLDER SKY_VENV COMMAND ... | down FOLDER SKY_VENV        (root)
# SkyPilot's API server and its Slurm cloud against the Slurm of $SLURM_CONF, on this machine alone. Everything sees a
# home of its own (a mount namespace), so that the user's ~/.sky, ~/.ssh and ~/.slurm are left alone.
set -euo pipefail
do=$1 W=$2 VENV=$3; shift 3
PYTHON310=$(ls -d ~/.pyenv/versions/3.10.*/bin 2> /dev/null | tail -1)    # SkyPilot's own on the nodes
PYTHON310=${PYTHON310:-$(dirname "$(uv python find 3.10)")}
NODE_PATH=$W/shim:$PYTHON310:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

inside() {
  nsenter --mount --target "$(cat "$W/namespace.pid")" env -i HOME=/root SLURM_CONF="$SLURM_CONF" \
    SKYPILOT_DISABLE_USAGE_COLLECTION=1 PATH="$VENV/bin:$NODE_PATH" "$@"
}

case $do in
up)
  port=$((2200 + $$ % 7000))    # another one each time: SkyPilot's connections outlive it
  mkdir -p "$W"/{home/.ssh,home/.slurm,home/.sky,shim,keys}; chmod 700 "$W/home/.ssh"
  # nodes install uv with a script from the network: here it is the one of this machine
  cat > "$W/shim/curl" <<EOF
#!/bin/bash
case "\$*" in *uv/install.sh*) echo 'mkdir -p "\$UV_INSTALL_DIR" && cp $(command -v uv) "\$UV_INSTALL_DIR/uv"' ;;
*) exec /usr/bin/curl "\$@" ;; esac
EOF
  chmod +x "$W/shim/curl"
  # before it recovers a job, SkyPilot asks whether the network is there: here it may ask itself
  sed -i "s#^_TEST_IP_LIST = .*#_TEST_IP_LIST = ['http://127.0.0.1:46580/api/health']#" \
    "$VENV"/lib/python3*/site-packages/sky/backends/backend_utils.py
  printf 'jobs:\n  controller:\n    consolidation_mode: true\n' > "$W/home/.sky/config.yaml"
  for key in host user; do ssh-keygen -q -t ed25519 -N "" -f "$W/keys/$key"; done
  install -m 600 "$W/keys/user.pub" "$W/home/.ssh/authorized_keys"
  cat > "$W/home/.slurm/config" <<EOF
Host here
  HostName 127.0.0.1
  Port $port
  User root
  IdentityFile $W/keys/user
  IdentitiesOnly yes
EOF
  cat > "$W/sshd_config" <<EOF
Port $port
ListenAddress 127.0.0.1
HostKey $W/keys/host
PidFile $W/sshd.pid
PasswordAuthentication no
UsePAM no
StrictModes no
MaxSessions 100
MaxStartups 100
Subsystem sftp internal-sftp
SetEnv SLURM_CONF=$SLURM_CONF PATH=$NODE_PATH
EOF
  { cat /etc/profile; echo "export PATH=$NODE_PATH SLURM_CONF=$SLURM_CONF"; } > "$W/profile"    # of login shells
  keep=""
  for folder in .pyenv .local; do
    if [ -d "/root/$folder" ]; then mkdir -p "$W/home/$folder"; keep+="mount --rbind /root/$folder $W/home/$folder; "; fi
  done
  mkdir -p /run/sshd
  setsid unshare --mount --propagation private bash -c \
    "$keep mount --rbind $W/home /root; mount --bind $W/profile /etc/profile; exec sleep infinity" > /dev/null 2>&1 &
  echo $! > "$W/namespace.pid"
  until [ "$(cat "/proc/$(cat "$W/namespace.pid")/comm")" = sleep ]; do sleep 0.1; done
  inside /usr/sbin/sshd -f "$W/sshd_config" -E "$W/sshd.log"
  inside sky api start > "$W/api.log" 2>&1
  inside sky check slurm > "$W/check.log" 2>&1
  ;;
run) inside bash -c 'cd "$0"; "$@"' "$PWD" "$@" ;;
down)
  inside sky api stop || true
  kill "$(cat "$W/sshd.pid")" "$(cat "$W/namespace.pid")" || true
  ;;
esac
