#!/bin/sh
# Puts an image of memfit serve into the place of the one that runs on this computer, and puts that one back where the new one does not become ready.
#   deploy/deploy.sh IMAGE [CONTAINER]
# The volume CONTAINER keeps the store and all runs. Runs end with the old container and go on from their last snapshots in the new one.
set -eu
image=${1:?which image: deploy/deploy.sh IMAGE [CONTAINER]}
name=${2:-memfit}

start() {
  docker rm --force "$name" > /dev/null 2>&1 || true
  docker run --detach --name "$name" --restart unless-stopped --volume "$name:/var/lib/memfit" --publish 127.0.0.1:8321:8321 "$1" > /dev/null
}

ready() {
  tries=${DEPLOY_TRIES:-60}
  while [ "$tries" -gt 0 ]; do
    case $(docker inspect --format '{{.State.Health.Status}}' "$name" 2> /dev/null || echo gone) in
      healthy) return 0 ;;
      unhealthy | gone) return 1 ;;
    esac
    tries=$((tries - 1))
    sleep "${DEPLOY_SECONDS:-2}"
  done
  return 1
}

docker image inspect "$image" > /dev/null || docker pull "$image"
before=$(docker inspect --format '{{.Image}}' "$name" 2> /dev/null || true)
if [ -n "$before" ]; then
  # Nothing new starts while the rest of this runs, and the store has a copy from before the upgrade.
  docker exec "$name" memfit serve --folder /var/lib/memfit/service --drain || true
  docker exec "$name" memfit serve --folder /var/lib/memfit/service --backup /var/lib/memfit/before-upgrade.sqlite || true
  docker stop --time 60 "$name" > /dev/null
fi
start "$image"
if ready; then
  echo "$image is ready"
  exit 0
fi
docker logs --tail 20 "$name" >&2 || true
if [ -z "$before" ]; then
  echo "$image did not become ready, and there was none before it" >&2
  exit 1
fi
# An upgraded store is not read by the version before: it gets its copy back.
docker rm --force "$name" > /dev/null 2>&1 || true
docker run --rm --volume "$name:/var/lib/memfit" "$before" --restore /var/lib/memfit/before-upgrade.sqlite || true
start "$before"
echo "$image did not become ready: $before runs again" >&2
exit 1
